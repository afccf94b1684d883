"""Convert a checkpoint to an archive and back: the same bits in fewer bytes, still one HDF5 file that any HDF5 reads.

    rank 0   read, check, pack block 0 ............... chunk 0 | chunk 1 | chunk 2 | ..  -- tables, header, rename
    rank 1   read, check, pack block 1 --chunk--------------------^
    rank 2   read, check, pack block 2 --chunk------------------------------^

A chunk of a dataset is a block, packed (layout.py) by any rank and thread; rank 0 puts them into the file in their
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

from hpcllm.checkpoint import file_layout, layout
from hpcllm.checkpoint.exchange import FirstError
from hpcllm.checkpoint.header import Index, header_bytes
from hpcllm.checkpoint.layout import Block, DatasetSpec, checksum
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.errors import CheckpointError, DataError, HpcllmError
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed, rank_and_size
from hpcllm.system.raw_files import disk_errors, make_dataset
from hpcllm.system.text import printable, size_text

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Report:
    """Sizes and time of packing or unpacking."""

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
    """Write the archive of a checkpoint. All ranks layout.pack, rank 0 writes. Collective over comm.

    level: of Zstandard. advance: rank 0 gets the bytes of tensors that are packed, as they are. Raises DataError if
    the source is an archive, CheckpointError on all ranks if it is damaged or the target cannot be written: there is
    then no target.
    """
    started_s = time.perf_counter()
    with Checkpoint.open(source, comm) as checkpoint:
        if checkpoint.is_packed:
            raise _everywhere(DataError(f"{source} is an archive already"))
        index = Index(checkpoint.specs, checkpoint.attributes)
        with file_layout.temporary_path(target, comm) as temporary:
            size = on_root(comm, lambda: _create(temporary, target, index, level))
            packed = _pack_blocks(checkpoint, temporary, level, advance)
            each = (checkpoint.datasets[name].checksums for name in sorted(index.datasets))
            checksums = np.concatenate([np.empty(0, np.uint64), *each])
            on_root(comm, lambda: file_layout.finish(temporary, target, index, size, checksums, packed))
        return _report(checkpoint, target, started_s)


def decompress(
    source: Path, target: Path, comm: MPI.Intracomm | None, advance: Callable[[int], None] = lambda _: None
) -> Report:
    """Write the checkpoint that an archive was made of; all ranks unpack and write. Collective over comm.

    advance: gets the bytes of tensors that this rank has unpacked, as it does. Raises as `compress`.
    """
    started_s = time.perf_counter()
    with Checkpoint.open(source, comm) as checkpoint:
        if not checkpoint.is_packed:
            raise _everywhere(DataError(f"{source} is no archive, so it is what decompress would write"))
        specs = checkpoint.specs
        rank, ranks = rank_and_size(comm)
        blocks = layout.my_blocks(specs, rank, ranks)
        slabs = [specs[name].block(name, index) for name, index in blocks]
        unpacked = zip(slabs, map_ahead(lambda block: checkpoint.read_block(*block), blocks, ranks), strict=True)

        def next_block(slab: Slab) -> np.ndarray:
            """The next block; the writer calls in the order of the file, as they come."""
            expected, values = next(unpacked)
            assert slab == expected
            advance(values.nbytes)
            return values

        write(target, comm, prepare(comm, specs, slabs), next_block, checkpoint.attributes)
        return _report(checkpoint, target, started_s)


def _everywhere(error: HpcllmError) -> HpcllmError:
    """Mark an error as raised by all ranks: all have the same directory."""
    error.everywhere = True
    return error


def _report(checkpoint: Checkpoint, target: Path, started_s: float) -> Report:
    written = on_root(checkpoint.comm, lambda: target.stat().st_size)
    tensors = sum(stored.spec.bytes for stored in checkpoint.datasets.values())
    seconds = time.perf_counter() - started_s
    return Report(checkpoint.path, target, checkpoint.file_bytes, written, tensors, seconds)


def _create(temporary: Path, target: Path, index: Index, level: int) -> int:
    """Create the file with all datasets and no chunk. Returns the size of its header."""
    with disk_errors(CheckpointError, f"cannot create {target}"):
        size = header_bytes(index)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with file_layout.create(temporary, size) as file:
            for name in sorted(index.datasets):
                _add_chunked(file, name, index.datasets[name], level)
        return size


def _add_chunked(file: h5py.File, name: str, spec: DatasetSpec, level: int) -> None:
    """Add a dataset of which each block is to be a chunk. HDF5 chunks no scalar: it becomes an array of one element."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_chunk(spec.block_shape or (1,))
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_shuffle()
    creation.set_filter(layout.ZSTD_FILTER, h5py.h5z.FLAG_OPTIONAL, (level,))  # this process has none
    make_dataset(file, name, spec.shape or (1,), layout.STORED_AS[spec.dtype], creation)
    file_layout.set_dtype(file, name, spec)


def _pack_blocks(
    checkpoint: Checkpoint, temporary: Path, level: int, advance: Callable[[int], None]
) -> np.ndarray | None:
    """Pack all blocks into the file; returns /packed, on rank 0. Collective.

    A rank that fails goes on with empty chunks, so that nobody waits for it.
    """
    comm, specs = checkpoint.comm, checkpoint.specs
    rank, ranks = rank_and_size(comm)
    blocks = layout.blocks_of(specs)
    first = FirstError()

    def packed_or_empty(block: Block) -> bytes:
        spec = specs[block[0]]
        with first:
            if not first.error:
                values = checkpoint.read_block(*block)
                return layout.pack(layout.as_bytes(values), spec.item_bytes, spec.chunk_bytes, level)
        return b""

    mine = map_ahead(packed_or_empty, blocks[rank::ranks], ranks)
    packed = None
    if comm and rank:
        for chunk in mine:
            _send(comm, chunk)
    else:
        turns = (number % ranks for number in range(len(blocks)))
        chunks = (_receive(comm, turn) if comm and turn else next(mine) for turn in turns)
        with first, disk_errors(CheckpointError, f"cannot write {temporary}"):
            packed = _write_chunks(temporary, specs, zip(blocks, chunks, strict=True), advance)
        for _ in chunks:  # of ranks that go on, if this one could not
            pass
    raise_if_any_failed(comm, first.error)
    return packed


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
            dataset.write_direct_chunk(start, chunk, layout.filter_mask(len(chunk), specs[name].chunk_bytes))
            places.append((dataset.get_chunk_info_by_coord(start).byte_offset, len(chunk), checksum(chunk)))
            advance(layout.block_bytes(specs, (name, index)))
        size = file.userblock_size
    packed = np.array(places, dtype=np.uint64).reshape(-1, 3)
    if len(packed):
        packed[:, 0] += _base(temporary, packed[0], size)
    return packed


def _base(temporary: Path, first: np.ndarray, header_size: int) -> int:
    """Byte of the file from which HDF5 counts offsets of chunks: some versions leave the header out.

    first: row of the first chunk in /packed. Raises CheckpointError.
    """
    offset, length, xxh3 = map(int, first)
    with temporary.open("rb") as file:
        for base in (0, header_size):
            file.seek(offset + base)
            if checksum(file.read(length)) == xxh3:
                return base
    raise CheckpointError(f"{temporary} does not have its first chunk where HDF5 says")


def _send(comm: MPI.Intracomm, chunk: bytes) -> None:
    """Send a chunk to rank 0, when it receives it."""
    from hpcllm.mpi.wait import WORK, job_waits  # starts MPI

    job_waits.waits(WORK).all([comm.Isend(np.frombuffer(chunk, np.uint8), 0)], lambda: "rank 0 to write what is packed")


def _receive(comm: MPI.Intracomm, rank: int) -> bytes:
    from mpi4py import MPI

    from hpcllm.mpi.wait import WORK, job_waits  # starts MPI

    status = MPI.Status()
    what = f"a chunk that rank {rank} packs"
    job_waits.waits(WORK).until(lambda: comm.Iprobe(rank, status=status), lambda: what)
    chunk = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv(np.frombuffer(chunk, np.uint8), rank)
    return bytes(chunk)
