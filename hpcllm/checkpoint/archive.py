"""A checkpoint <-> an archive of it: the same bits in fewer bytes, still one HDF5 file that anyone's HDF5 reads.

    rank 0   read, check, pack block 0 ............... chunk 0 | chunk 1 | chunk 2 | ..  -- tables, front, rename
    rank 1   read, check, pack block 1 --chunk--------------------^
    rank 2   read, check, pack block 2 --chunk------------------------------^

A chunk of a dataset is a block, packed (packing.py) by any rank and thread; rank 0 puts them into the file in their
order, so the file does not depend on how many there are. /checksums is that of the checkpoint, and /packed says where
each chunk lies. Unpacking is writing a checkpoint whose source is the archive: with the same library, byte for byte the
file that was packed. Works without MPI: comm=None.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpcllm.checkpoint import guard, skeleton
from hpcllm.checkpoint.ahead import ahead
from hpcllm.checkpoint.index import Index
from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, as_bytes, checksum
from hpcllm.checkpoint.messages import FirstError
from hpcllm.checkpoint.packing import ZSTD_FILTER, filter_mask, pack
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.shares import Block, block_bytes, blocks_of, my_blocks
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.verify import specs_of
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.errors import CheckpointError, DataError, HpcllmError
from hpcllm.printable import printable, size_text
from hpcllm.raw_hdf5 import make_dataset
from hpcllm.together import on_root, place_in, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Report:
    """What packing or unpacking took."""

    source: Path
    target: Path
    source_bytes: int
    target_bytes: int
    tensor_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON. ratio: of the larger file to the smaller one; gb_s: of tensors, in 10^9 bytes."""
        fields = {**dataclasses.asdict(self), "source": str(self.source), "target": str(self.target)}
        return {**fields, "ratio": self.ratio, "gb_s": self.tensor_bytes / self.seconds / 1e9}

    @property
    def ratio(self) -> float:
        return max(self.source_bytes, self.target_bytes) / min(self.source_bytes, self.target_bytes)

    def lines(self) -> list[str]:
        rate = f"{self.seconds:.1f} s, {self.tensor_bytes / self.seconds / 1e9:.2f} GB/s"
        sizes = f"{size_text(self.source_bytes)} -> {size_text(self.target_bytes)}, ratio {self.ratio:.2f}"
        return [f"{printable(str(self.target))}: {sizes} ({rate})"]


def compress(
    source: Path,
    target: Path,
    comm: MPI.Intracomm | None,
    level: int = 1,
    advance: Callable[[int], None] = lambda _: None,
) -> Report:
    """Write the archive of a checkpoint. All ranks pack, rank 0 writes. Collective over comm.

    level: of Zstandard. advance: rank 0 is told the bytes of tensors that are packed, as they are. Raises DataError if
    the source is an archive, CheckpointError on all ranks if it is damaged or the target cannot be written: there is
    then no target.
    """
    started_s = time.perf_counter()
    with Checkpoint.open(source, comm) as checkpoint:
        if checkpoint.is_packed:
            raise _everywhere(DataError(f"{source} is an archive already"))
        index = Index(specs_of(checkpoint), checkpoint.attributes)
        with skeleton.aside(target, comm) as temporary:
            front = on_root(comm, lambda: _make(temporary, target, index, level))
            packed = _pack_together(checkpoint, temporary, level, advance)
            each = (checkpoint.datasets[name].checksums for name in sorted(index.datasets))
            checksums = np.concatenate([np.empty(0, np.uint64), *each])
            on_root(comm, lambda: skeleton.finish(temporary, target, index, front, checksums, packed))
        return _report(checkpoint, target, started_s)


def decompress(
    source: Path, target: Path, comm: MPI.Intracomm | None, advance: Callable[[int], None] = lambda _: None
) -> Report:
    """Write the checkpoint that an archive was made of; all ranks unpack and write. Collective over comm.

    advance: told the bytes of tensors that this rank has unpacked, as it does. Raises as `compress`.
    """
    started_s = time.perf_counter()
    with Checkpoint.open(source, comm) as checkpoint:
        if not checkpoint.is_packed:
            raise _everywhere(DataError(f"{source} is no archive, so it is what decompress would write"))
        specs = specs_of(checkpoint)
        rank, ranks = place_in(comm)
        blocks = my_blocks(specs, rank, ranks)
        slabs = [specs[name].block(name, index) for name, index in blocks]
        unpacked = zip(slabs, ahead(lambda block: checkpoint.read_block(*block), blocks, ranks), strict=True)

        def next_block(slab: Slab) -> np.ndarray:
            """The writer asks in the order of the file, as they come."""
            expected, values = next(unpacked)
            assert slab == expected
            advance(values.nbytes)
            return values

        write(target, comm, prepare(comm, specs, slabs), next_block, checkpoint.attributes)
        return _report(checkpoint, target, started_s)


def _everywhere(error: HpcllmError) -> HpcllmError:
    """All ranks have looked at the same directory, and raise the same."""
    error.everywhere = True
    return error


def _report(checkpoint: Checkpoint, target: Path, started_s: float) -> Report:
    written = on_root(checkpoint.comm, lambda: target.stat().st_size)
    tensors = sum(stored.spec.bytes for stored in checkpoint.datasets.values())
    seconds = time.perf_counter() - started_s
    return Report(checkpoint.path, target, checkpoint.file_bytes, written, tensors, seconds)


def _make(temporary: Path, target: Path, index: Index, level: int) -> int:
    """The file with all datasets and no chunk. Returns the size of its front."""
    try:
        front = guard.front_bytes(index)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with skeleton.create(temporary, front) as file:
            for name in sorted(index.datasets):
                _add_chunked(file, name, index.datasets[name], level)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"cannot create {target}: {skeleton.reason(error)}") from error
    return front


def _add_chunked(file: h5py.File, name: str, spec: DatasetSpec, level: int) -> None:
    """A dataset of which each block is to be a chunk. HDF5 chunks no scalar: it is made an array of one element."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk(spec.block_shape or (1,))
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_shuffle()
    creation.set_filter(ZSTD_FILTER, h5py.h5z.FLAG_OPTIONAL, (level,))  # optional: this process has no such filter
    make_dataset(file, name, spec.shape or (1,), STORED_AS[spec.dtype], creation)
    skeleton.say_dtype(file, name, spec)


def _pack_together(
    checkpoint: Checkpoint, temporary: Path, level: int, advance: Callable[[int], None]
) -> np.ndarray | None:
    """Returns /packed, on rank 0. Collective. Whoever fails goes on with empty chunks, so that nobody waits for it."""
    comm, specs = checkpoint.comm, specs_of(checkpoint)
    rank, ranks = place_in(comm)
    blocks = blocks_of(specs)
    first = FirstError()

    def packed_or_empty(block: Block) -> bytes:
        with first:
            return b"" if first.error else _packed(checkpoint, block, level)
        return b""

    mine = ahead(packed_or_empty, blocks[rank::ranks], ranks)
    packed = None
    if comm and rank:
        for chunk in mine:
            _send(comm, chunk)
    else:
        turns = (number % ranks for number in range(len(blocks)))
        chunks = (_receive(comm, turn) if comm and turn else next(mine) for turn in turns)
        with first:
            packed = _write_chunks(temporary, specs, zip(blocks, chunks, strict=True), advance)
        for _ in chunks:  # of ranks that go on, if this one could not
            pass
    raise_together(comm, _as_ours(first.error, temporary))
    return packed


def _packed(checkpoint: Checkpoint, block: Block, level: int) -> bytes:
    spec = checkpoint.datasets[block[0]].spec
    return pack(as_bytes(checkpoint.read_block(*block)), spec.item_bytes, spec.chunk_bytes, level)


def _write_chunks(
    temporary: Path,
    specs: Mapping[str, DatasetSpec],
    chunks: Iterable[tuple[Block, bytes]],
    advance: Callable[[int], None],
) -> np.ndarray:
    """Write chunks until one is empty. Returns where each lies, and its checksum."""
    places = []
    with h5py.File(temporary, "r+", locking=False) as file:
        for (name, index), chunk in chunks:
            if not chunk:
                break
            start = specs[name].block(name, index).start or (0,)
            dataset = file[name].id
            dataset.write_direct_chunk(start, chunk, filter_mask(len(chunk), specs[name].chunk_bytes))
            places.append((dataset.get_chunk_info_by_coord(start).byte_offset, len(chunk), checksum(chunk)))
            advance(block_bytes(specs, (name, index)))
        front = file.userblock_size
    packed = np.array(places, dtype=np.uint64).reshape(-1, 3)
    if len(packed):
        packed[:, 0] += _base(temporary, packed[0], front)
    return packed


def _base(temporary: Path, first: np.ndarray, front: int) -> int:
    """What offsets of chunks count from: some versions of HDF5 leave the front out. Raises CheckpointError.

    first: what /packed would say of the first chunk.
    """
    offset, length, xxh3 = map(int, first)
    with temporary.open("rb") as file:
        for base in (0, front):
            file.seek(offset + base)
            if checksum(file.read(length)) == xxh3:
                return base
    raise CheckpointError(f"{temporary} does not have its first chunk where HDF5 says")


def _as_ours(error: Exception | None, temporary: Path) -> Exception | None:
    if isinstance(error, OSError | ValueError | RuntimeError):  # as the library has them
        return CheckpointError(f"cannot write {temporary}: {skeleton.reason(error)}")
    return error


def _send(comm: MPI.Intracomm, chunk: bytes) -> None:
    """To rank 0, when it asks for it."""
    from hpcllm.together import REPORT_LIMIT_S
    from hpcllm.waiting import Waits

    Waits(REPORT_LIMIT_S).all([comm.Isend(np.frombuffer(chunk, np.uint8), 0)], lambda: "rank 0 to write what is packed")


def _receive(comm: MPI.Intracomm, rank: int) -> bytes:
    from mpi4py import MPI

    from hpcllm.together import REPORT_LIMIT_S
    from hpcllm.waiting import Waits

    status = MPI.Status()
    what = f"a chunk that rank {rank} packs"
    Waits(REPORT_LIMIT_S).until(lambda: comm.Iprobe(rank, status=status), lambda: what)
    chunk = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv(np.frombuffer(chunk, np.uint8), rank)
    return bytes(chunk)
