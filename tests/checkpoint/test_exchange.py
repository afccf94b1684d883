"""All ranks write one file; whoever reads it, in whatever split, gets the same bits."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from pytest_mpi import parallel_assert
from small_checkpoints import own_attributes, verify, write_slabs

from hpcllm.checkpoint import exchange, layout
from hpcllm.checkpoint.folder import load_newest
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import fetch
from hpcllm.checkpoint.slabs import Slab, intersection, whole
from hpcllm.checkpoint.writer import prepare
from hpcllm.errors import CheckpointError

SIZES = [1, 2, 3, 4]


def rows_of(rank: int, size: int, shape: tuple[int, ...]) -> Slab:
    first, last = rank * shape[0] // size, (rank + 1) * shape[0] // size
    return Slab("w", (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))


def columns_of(rank: int, size: int, shape: tuple[int, ...]) -> Slab:
    first, last = rank * shape[1] // size, (rank + 1) * shape[1] // size
    return Slab("w", (0, first), (shape[0], last - first))


@pytest.mark.parallel(SIZES)
def test_random_splits_write_and_read_the_same_bits(comm, shared_path, partition, index_of):
    rng = np.random.default_rng(comm.size)  # the same on all ranks
    for case in range(5):
        shape = tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 4)))
        tensor = rng.standard_normal(shape).astype("f4")
        pieces = partition(rng, "a/w", shape, int(rng.integers(8)))
        mine = {s: np.ascontiguousarray(tensor[index_of(s)]) for s in pieces[comm.rank :: comm.size]}
        specs = {"a/w": DatasetSpec(shape, "float32")} if mine else {}
        report = write_slabs(shared_path / f"{case}.h5", comm, specs, mine, {"case": case})
        assert report.bytes == tensor.nbytes
        with Checkpoint.open(report.path, comm) as checkpoint:
            verify(checkpoint)
            others = partition(rng, "a/w", shape, 5)
            same = [np.array_equal(checkpoint.read(s), tensor[index_of(s)]) for s in others]
            parallel_assert(all(same) and own_attributes(checkpoint.attributes) == {"case": case})
    parallel_assert(len(os.listdir(shared_path)) == 5)


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("split", [rows_of, columns_of])
def test_damage_is_found_by_every_rank_at_once(comm, shared_path, split):
    shape = (50, 30)
    tensor = np.arange(1500, dtype="f4").reshape(shape)
    slab = split(comm.rank, comm.size, shape)
    part = tensor[tuple(slice(s, s + n) for s, n in zip(slab.start, slab.shape, strict=True))]
    spec = {"w": DatasetSpec(shape, "float32")}
    for step in (1, 2, 3):
        write_slabs(shared_path / f"step_{step:08d}.h5", comm, spec, {slab: np.ascontiguousarray(part)}, {})
    if comm.rank == 0:
        with (shared_path / "step_00000003.h5").open("r+b") as file:
            file.truncate(6000)
        with Checkpoint.open(shared_path / "step_00000002.h5") as two, two.path.open("r+b") as file:
            file.seek(two.datasets["w"].offset + 4 * 777)
            file.write(b"\xff")
    comm.Barrier()

    def load(checkpoint: Checkpoint) -> bool:
        values = np.empty_like(part, order="C")
        fetch(checkpoint, [(slab, values)])
        return checkpoint.path == shared_path / "step_00000001.h5" and np.array_equal(values, part)

    found, passed_over = load_newest(shared_path, comm, load)
    parallel_assert("00000003" in passed_over[0] and "cut" in passed_over[0])
    parallel_assert("00000002" in passed_over[1] and " w from " in passed_over[1])
    parallel_assert(found)


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize(("wrote", "reads"), [(rows_of, columns_of), (columns_of, rows_of), (rows_of, rows_of)])
def test_no_byte_is_handed_out_unverified(comm, shared_path, monkeypatch, wrote, reads):
    """Alone, a rank finds damage in the blocks that it touches; together, all learn of it and who has read it."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4 * 18 * 5)
    shape, hurt = (24, 18), Slab("w", (5, 0), (5, 18))
    tensor = np.arange(24 * 18, dtype="f4").reshape(shape)
    mine = wrote(comm.rank, comm.size, shape)
    values = np.ascontiguousarray(tensor[tuple(slice(s, s + n) for s, n in zip(mine.start, mine.shape, strict=True))])
    path = write_slabs(shared_path / "x.h5", comm, {"w": DatasetSpec(shape, "float32")}, {mine: values}, {}).path
    if comm.rank == 0:
        with Checkpoint.open(path) as one, path.open("r+b") as file:
            file.seek(one.datasets["w"].offset + 4 * (7 * shape[1] + 2))
            file.write(b"\xff\xff\xff\xff")
    comm.Barrier()
    wanted = reads(comm.rank, comm.size, shape)
    with Checkpoint.open(path, comm) as checkpoint:
        damage = r"w from \(5, 0\), shape \(5, 18\), has changed"
        with pytest.raises(CheckpointError, match=damage) if intersection(wanted, hurt).elements else nullcontext():
            checkpoint.read(wanted)
        with pytest.raises(CheckpointError, match=damage):
            verify(checkpoint)
        out = np.empty(wanted.shape, "f4")
        with pytest.raises(CheckpointError, match=rf"1 of {comm.size} ranks failed: rank \d.*{damage}"):
            fetch(checkpoint, [(wanted, out)])
        sound = [s for s in (Slab("w", (row, 3), (1, 9)) for row in range(24)) if not intersection(s, hurt).elements]
        pairs = [(s, np.empty(s.shape, "f4")) for s in sound[comm.rank :: comm.size]]
        fetch(checkpoint, pairs)
        parallel_assert(all((row[0] == tensor[s.start[0], 3:12]).all() for s, row in pairs))


@pytest.mark.parallel([2, 3])
def test_arrays_may_change_once_they_are_handed_over(comm):
    """Those of ranks that own no block, too, who wait for nothing but their own messages."""
    columns, is_last = 3, comm.rank == comm.size - 1
    mine = Slab("w", (0, columns * comm.rank), (40, 30 if is_last else columns))
    plan = prepare(comm, {"w": DatasetSpec((40, columns * (comm.size - 1) + 30), "float32")}, [mine])
    for value in (1, 2, 3):
        values, blocks = np.full(mine.shape, value, "f4"), []
        exchange.to_owners(plan, comm, {mine: values}.__getitem__, lambda *block: blocks.append(block[2].tobytes()))  # noqa: B023
        values.fill(-1)
        parallel_assert(len(blocks) == is_last)
        parallel_assert(all((np.frombuffer(block, "f4") == value).all() for block in blocks))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(("wrote", "reads"), [(rows_of, columns_of), (columns_of, rows_of)])
def test_what_is_under_way_does_not_grow_with_the_file(comm, shared_path, monkeypatch, index_of, wrote, reads):
    """Messages and scratch memory of a few turns, in writing and in reading, however many turns there are."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 4 * 18 * 5)
    monkeypatch.setattr(exchange, "_SCRATCH_BYTES", 4 * 18 * 5)
    hold, most = exchange._Messages._hold, np.zeros(2, int)

    def counted(self, values, peer):
        np.maximum(most, (len(self._held), len(self._chunks)), out=most)
        return hold(self, values, peer)

    monkeypatch.setattr(exchange._Messages, "_hold", counted)

    def most_of(blocks: int) -> list[list[int]]:
        shape, found = (5 * blocks * comm.size, 18), []
        tensor = np.arange(shape[0] * shape[1], dtype="f4").reshape(shape)
        mine, wanted = wrote(comm.rank, comm.size, shape), reads(comm.rank, comm.size, shape)
        values, out = np.ascontiguousarray(tensor[index_of(mine)]), np.empty(wanted.shape, "f4")
        most[:] = 0
        path = shared_path / f"{blocks}.h5"
        write_slabs(path, comm, {"w": DatasetSpec(shape, "float32")}, {mine: values}, {})
        found.append(most.tolist())
        most[:] = 0
        with Checkpoint.open(path, comm) as checkpoint:
            fetch(checkpoint, [(wanted, out)])
        parallel_assert((out == tensor[index_of(wanted)]).all())
        return [*found, most.tolist()]

    many, few = most_of(32), most_of(8)
    parallel_assert(many == few)
    parallel_assert(np.any(many))


@contextmanager
def files_no_larger_than(limit_bytes: int):
    """A disk that is full for this process alone: writing beyond the limit fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parallel(SIZES)
def test_one_full_disk_is_an_error_on_all_and_the_old_file_stays(comm, shared_path):
    shape, path = (1 << 22,), shared_path / "step_00000001.h5"
    slab = rows_of(comm.rank, comm.size, shape)
    spec = {"w": DatasetSpec(shape, "float32")}
    write_slabs(path, comm, spec, {slab: np.full(slab.shape, 1, "f4")}, {})
    last = comm.rank == comm.size - 1
    with (
        files_no_larger_than(1 << 16) if last else files_no_larger_than(1 << 40),
        pytest.raises(CheckpointError) as caught,
    ):
        write_slabs(path, comm, spec, {slab: np.full(slab.shape, 2, "f4")}, {})
    told = f"rank {comm.size - 1}" if comm.size > 1 else "cannot create"
    parallel_assert(told in str(caught.value) and "step_00000001.h5" in str(caught.value))
    parallel_assert("File too large" in str(caught.value) or comm.size == 1)
    comm.Barrier()
    parallel_assert(os.listdir(shared_path) == [path.name])
    with Checkpoint.open(path, comm) as checkpoint:
        verify(checkpoint)
        parallel_assert((checkpoint.read_whole("w") == 1).all())


@pytest.mark.parallel([2, 3, 4])
def test_ranks_that_disagree_are_told(comm, shared_path):
    shape = (4 + (comm.rank == 1),)
    with pytest.raises(CheckpointError, match="ranks disagree on w"):
        write_slabs(shared_path / "x.h5", comm, {"w": DatasetSpec(shape, "float32")}, {}, {})
    doubled = {whole("w", (4,)): np.zeros(4, "f4")}
    with pytest.raises(CheckpointError, match=rf"element \(0,\) is held {comm.size} times"):
        write_slabs(shared_path / "x.h5", comm, {"w": DatasetSpec((4,), "float32")}, doubled, {})
    wrong = {whole("w", (4,)): np.zeros(4, "f8")} if comm.rank == 1 else {}
    with pytest.raises(CheckpointError, match=r"rank 1: .* has float64"):
        write_slabs(shared_path / "x.h5", comm, {"w": DatasetSpec((4,), "float32")}, wrong, {})
    comm.Barrier()
    parallel_assert(os.listdir(shared_path) == [])
