"""All ranks read together: each gets what it asked for, each byte of the file is read once, errors are everyone's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pytest_mpi import parallel_assert
from small_checkpoints import write_slabs

from hpcllm.checkpoint import layout, restore
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import fetch
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.errors import CheckpointError

SHAPES = {"a/column": (40, 1), "b/cube": (7, 6, 5), "c/matrix": (33, 20), "d/scalar": (), "e/vector": (100,)}


@pytest.fixture
def known() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    return {name: rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}


@pytest.fixture
def path(comm, shared_path, known, monkeypatch) -> Path:
    """A file of many blocks, written by rank 0's process alone."""
    monkeypatch.setattr(layout, "BLOCK_BYTES", 300)
    if comm.rank == 0:
        specs = {name: DatasetSpec(shape, "float32") for name, shape in SHAPES.items()}
        write_slabs(shared_path / "x.h5", None, specs, {whole(n, t.shape): t for n, t in known.items()}, {})
    comm.Barrier()
    return shared_path / "x.h5"


def random_slabs(rng: np.random.Generator) -> list[Slab]:
    """Boxes anywhere, some without elements, some twice."""
    slabs = []
    for _ in range(int(rng.integers(0, 9))):
        name = str(rng.choice(list(SHAPES)))
        ends = [sorted(int(i) for i in rng.integers(0, n + 1, 2)) for n in SHAPES[name]]
        slabs.append(Slab(name, tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return slabs + slabs[:1]


@pytest.mark.parallel([1, 2, 3, 4])
def test_everyone_gets_what_it_asked_for(comm, path, known, index_of):
    rng = np.random.default_rng(comm.rank)
    with Checkpoint.open(path, comm) as checkpoint:
        for _ in range(12):
            wanted = [(slab, np.full(slab.shape, np.nan, "f4")) for slab in random_slabs(rng)]
            fetch(checkpoint, wanted)
            parallel_assert(all(np.array_equal(out, known[s.dataset][index_of(s)]) for s, out in wanted))


def bytes_read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process read")
@pytest.mark.parallel([1, 2, 3, 4])
def test_replicas_read_a_file_once(comm, shared_path):
    """All want everything, in columns one time, as a whole the other; each rank reads its share of the bytes."""
    shape, bound = (1 << 11, 1 << 11), 1 << 17  # 16 MiB, four blocks; some room for what MPI itself reads
    if comm.rank == 0:
        write_slabs(
            shared_path / "x.h5",
            None,
            {"w": DatasetSpec(shape, "float32")},
            {whole("w", shape): np.ones(shape, "f4")},
            {},
        )
    comm.Barrier()
    wanted = [(whole("w", shape), np.zeros(shape, "f4"))]
    columns = [(Slab("w", (0, c), (shape[0], 512)), np.zeros((shape[0], 512), "f4")) for c in range(0, shape[1], 512)]
    with Checkpoint.open(shared_path / "x.h5", comm) as checkpoint:
        for slabs in (wanted, columns):
            before = bytes_read_by_this_process()
            fetch(checkpoint, slabs)
            count = bytes_read_by_this_process() - before
            parallel_assert(all((out == 1).all() for _, out in slabs))
            assert wanted[0][1].nbytes <= comm.allreduce(count) <= wanted[0][1].nbytes + comm.size * bound
            parallel_assert(count <= -(-4 // comm.size) * layout.BLOCK_BYTES + bound)


@pytest.mark.parallel([1, 2, 3])
def test_a_wrong_wish_of_one_rank_is_refused_on_all(comm, path):
    last = comm.rank == comm.size - 1
    with Checkpoint.open(path, comm) as checkpoint:
        for slab, out, message in [
            (whole("a/none", (3,)), np.zeros(3, "f4"), "a/none is not in the file"),
            (Slab("e/vector", (90,), (20,)), np.zeros(20, "f4"), r"e/vector has shape \(100,\)"),
            (whole("e/vector", (100,)), np.zeros(100, "f8"), "cannot be read to float64"),
            (whole("e/vector", (100,)), np.zeros(200, "f4")[::2], "cannot be read to float32"),
            (whole("e/vector", (100,)), np.zeros(99, "f4"), r"cannot be read to float32 \(99,\)"),
        ]:
            with pytest.raises(
                CheckpointError, match=rf"rank {comm.size - 1}: .*{message}" if comm.size > 1 else message
            ):
                fetch(checkpoint, [(slab, out)] if last else [])


@pytest.mark.parallel([2, 3, 4])
def test_a_rank_that_sees_another_file_is_named(comm, path, known):
    """As on a file system whose nodes do not agree: rank 1 has zeros under that name."""
    everything = [(whole(name, t.shape), np.empty_like(t)) for name, t in known.items()]
    with Checkpoint.open(path, comm) as checkpoint:
        if comm.rank == 1:
            zeros = path.with_name("zeros")
            zeros.write_bytes(bytes(path.stat().st_size))
            with zeros.open("rb") as file:
                os.dup2(file.fileno(), checkpoint._descriptor)
        with pytest.raises(CheckpointError, match=r"1 of \d ranks failed: rank 1: .*has changed since it was written"):
            fetch(checkpoint, everything)


@pytest.mark.parallel([1])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 5, 100])
def test_rounds_are_all_datasets_once_and_none_is_much_larger_than_the_others(comm, path, known, rounds):
    with Checkpoint.open(path, comm) as checkpoint:
        names = list(restore._rounds(checkpoint, rounds))
    assert sorted(name for some in names for name in some) == sorted(known)
    sizes, each = [sum(known[name].nbytes for name in some) for some in names], max(t.nbytes for t in known.values())
    assert max(sizes) <= sum(sizes) / max(rounds, 1) + each
    assert len(names) <= max(rounds, 1)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("aside_bytes", [1, 1500, 1 << 28])
def test_values_are_converted_in_rounds(comm, path, known, monkeypatch, aside_bytes):
    """Some ranks convert, some do not, one wants nothing: the rounds are everyone's."""
    monkeypatch.setattr(restore, "_SCRATCH_BYTES", aside_bytes)
    dtype = [torch.bfloat16, torch.float32, torch.float64][comm.rank % 3]
    names = [] if comm.rank == 2 else list(known)
    wanted = [(whole(n, known[n].shape), torch.full(known[n].shape, float("nan"), dtype=dtype)) for n in names]
    turned = torch.full((20, 33), float("nan"))
    with Checkpoint.open(path, comm) as checkpoint:
        restore.fill(checkpoint, [*wanted, (whole("c/matrix", (33, 20)), turned.t())])
    same = [torch.equal(out, torch.from_numpy(known[s.dataset]).to(dtype)) for s, out in wanted]
    parallel_assert(all(same) and torch.equal(turned.t(), torch.from_numpy(known["c/matrix"])))
