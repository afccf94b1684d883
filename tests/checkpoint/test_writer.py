"""Writing: whoever brings what, the same bytes; whatever fails, all ranks are told and the file before it stays."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from pytest_mpi import parallel_assert
from small_checkpoints import own_attributes, verify, write_slabs

from hpcllm.checkpoint import layout, writer
from hpcllm.checkpoint.layout import CHECKSUMS, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab, whole
from hpcllm.checkpoint.writer import prepare, write
from hpcllm.config.schema import CheckpointConfig
from hpcllm.errors import CheckpointError, ConfigError
from hpcllm.mpi.partition import chunk_range

SIZES = [1, 2, 3, 4]
HAS_MPIO = h5py.get_config().mpi
WRITERS = ["offsets", pytest.param("mpio", marks=pytest.mark.skipif(not HAS_MPIO, reason="h5py without MPI"))]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(layout, "BLOCK_BYTES", 600)


def contents(path: Path) -> dict[str, bytes]:
    """The stored bytes of every dataset, and the checksums."""
    with h5py.File(path, "r", locking=False) as file:
        found: dict[str, bytes] = {CHECKSUMS: file[CHECKSUMS][()].tobytes()}
        file.visititems(
            lambda name, item: found.setdefault(name, item[()].tobytes()) and None if hasattr(item, "shape") else None
        )
        return found


def named(tensors: Mapping[str, np.ndarray], slabs: list[Slab], index_of) -> dict[Slab, np.ndarray]:
    return {s: np.array(tensors[s.dataset][index_of(s)], order="C").reshape(s.shape) for s in slabs}


def scattered(comm, partition, index_of, tensors: Mapping[str, np.ndarray], seed: int) -> dict[Slab, np.ndarray]:
    """Random boxes of every tensor, each on a random rank."""
    rng = np.random.default_rng(seed)  # the same on all ranks
    cut = [
        (slab, int(rng.integers(comm.size)))
        for name, t in tensors.items()
        for slab in partition(rng, name, t.shape, 12)
    ]
    return named(tensors, [slab for slab, rank in cut if rank == comm.rank], index_of)


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("kind", WRITERS)
def test_whoever_brings_what_the_tensors_and_checksums_are_the_same_bytes(
    comm, shared_path, partition, index_of, tensors, specs, kind
):
    alone = contents(
        write_slabs(
            shared_path / f"alone {comm.rank}.h5",
            None,
            specs,
            named(tensors, [whole(name, t.shape) for name, t in tensors.items()], index_of),
            {"a": 1},
        ).path
    )
    for seed in range(4):
        mine = scattered(comm, partition, index_of, tensors, seed)
        plan = prepare(comm, {slab.dataset: specs[slab.dataset] for slab in mine}, list(mine))
        for again in range(2):  # a plan is for a whole run
            path = shared_path / f"{seed}.h5"
            report = write(path, comm, plan, mine.__getitem__, {"a": again}, CheckpointConfig(writer=kind))
            parallel_assert(contents(path) == alone)
            with Checkpoint.open(report.path, comm) as checkpoint:
                verify(checkpoint)
                said = checkpoint.attributes
                parallel_assert(own_attributes(said) == {"a": again})
                parallel_assert(said["written/writer"] == kind and said["written/ranks"] == comm.size)
            comm.Barrier()


@pytest.mark.parallel(SIZES)
def test_a_source_may_be_larger_than_memory(comm, shared_path):
    """Slabs that are blocks: each is asked for once, in the order of the file, and a few exist at a time."""
    shape = (64, 30)
    values = np.arange(64 * 30, dtype="f4").reshape(shape)
    spec = DatasetSpec(shape, "float32")
    mine = [spec.block("w", n) for n in range(spec.blocks)][comm.rank :: comm.size]
    asked, alive, most = [], weakref.WeakSet(), 0

    class Tracked(np.ndarray):  # a plain array cannot be referred to weakly by a set
        __hash__ = object.__hash__

    def source(slab: Slab) -> np.ndarray:
        nonlocal most
        asked.append(slab)
        array = values[slab.start[0] : slab.start[0] + slab.shape[0]].copy().view(Tracked)
        alive.add(array)
        most = max(most, len(alive))
        return array

    write(shared_path / "x.h5", comm, prepare(comm, {"w": spec}, mine), source, {})
    parallel_assert(asked == mine and most <= 2)
    parallel_assert(contents(shared_path / "x.h5")["w"] == values.tobytes())


def fails(monkeypatch, module, name: str, error: Exception, after: int = 0) -> None:
    """A function that works so many times, and then raises."""
    real, calls = getattr(module, name), iter(range(10**9))

    def function(*args):
        if next(calls) >= after:
            raise error
        return real(*args)

    monkeypatch.setattr(module, name, function)


FAULTS = {
    "a full disk": lambda m: fails(m, writer, "write_at", OSError(errno.ENOSPC, "No space left on device"), 2),
    "a quota": lambda m: fails(m, writer, "write_at", OSError(errno.EDQUOT, "Disk quota exceeded")),
    "an error that fsync tells": lambda m: fails(m, writer.os, "fsync", OSError(errno.EIO, "Input/output error")),
    "a file that this node does not see": lambda m: fails(m, writer.os, "open", OSError(errno.ENOENT, "No such file")),
    "no memory": lambda m: fails(m, writer, "checksum", MemoryError("no memory"), 1),
}


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("who", ["first", "last", "all"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_takes_no_one_with_it(comm, shared_path, index_of, monkeypatch, fault, who):
    """The others neither hang nor rename; all are told; what was there is what is there."""
    tensors = {"w": np.arange(4000, dtype="f4").reshape(50, 80)}
    first, end = chunk_range(80, comm.size, comm.rank)
    mine = named(tensors, [Slab("w", (0, first), (50, end - first))], index_of)
    plan = prepare(comm, {"w": DatasetSpec((50, 80), "float32")}, list(mine))
    path = write(shared_path / "x.h5", comm, plan, mine.__getitem__, {}).path
    before = path.read_bytes()
    failing = {"first": 0, "last": comm.size - 1, "all": comm.rank}[who]
    with monkeypatch.context() as patched:
        if comm.rank == failing:
            FAULTS[fault](patched)
        with pytest.raises(Exception, match=r"x\.h5|no memory") as caught:
            write(path, comm, plan, lambda slab: mine[slab] + 1, {})
    parallel_assert(isinstance(caught.value, CheckpointError) or fault == "no memory")
    parallel_assert(who == "all" or failing == 0 or f"rank {failing}: " in str(caught.value))
    comm.Barrier()
    parallel_assert(path.read_bytes() == before and os.listdir(shared_path) == ["x.h5"])
    write(path, comm, plan, lambda slab: mine[slab] + 1, {})  # the same plan goes on
    parallel_assert(contents(path)["w"] == (tensors["w"] + 1).tobytes())


@pytest.mark.parallel(SIZES)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("wrong", ["a source that fails", "an array of another type", "an array with strides"])
def test_a_source_that_fails_on_one_rank_fails_on_all(comm, shared_path, kind, wrong):
    first, end = chunk_range(60, comm.size, comm.rank)
    rows = end - first
    plan = prepare(comm, {"w": DatasetSpec((60, 20), "float32")}, [Slab("w", (first, 0), (rows, 20))])

    def source(slab: Slab) -> np.ndarray:
        if comm.rank < comm.size - 1:
            return np.ones(slab.shape, "f4")
        if wrong == "a source that fails":
            raise CheckpointError("the source is cut")
        return np.ones((rows, 20), "f8") if "type" in wrong else np.ones((rows, 40), "f4")[:, ::2]

    with pytest.raises(
        CheckpointError, match=f"rank {comm.size - 1}: (the source is cut|.* needs a C-contiguous array)"
    ):
        write(shared_path / "x.h5", comm, plan, source, {}, CheckpointConfig(writer=kind))
    comm.Barrier()
    parallel_assert(os.listdir(shared_path) == [])


@pytest.mark.parallel(SIZES)
def test_a_folder_that_vanishes_is_an_error_on_all(comm, shared_path):
    folder = shared_path / "checkpoints"
    plan = prepare(comm, {"w": DatasetSpec((5000,), "uint8")}, [whole("w", (5000,))] if comm.rank == 0 else [])

    def source(slab: Slab) -> np.ndarray:
        shutil.rmtree(folder)
        return np.zeros(slab.shape, "u1")

    with pytest.raises(CheckpointError, match=r"cannot (write|finish) .*x\.h5.*: No such file or directory"):
        write(folder / "x.h5", comm, plan, source, {})


@pytest.mark.parallel([2, 3])
def test_rank_0_may_refuse_to_give_the_file_its_name(comm, shared_path):
    plan = prepare(comm, {"w": DatasetSpec((7,), "uint8")}, [whole("w", (7,))] if comm.rank == 1 else [])

    def check() -> None:
        raise CheckpointError("another job has taken over")

    with pytest.raises(CheckpointError, match="another job has taken over"):
        write(shared_path / "x.h5", comm, plan, lambda slab: np.zeros(slab.shape, "u1"), {}, check=check)
    comm.Barrier()
    parallel_assert(os.listdir(shared_path) == [])


def looking_first(real: Callable, look: Callable[[], None]) -> Callable:
    def function(*args, **options):
        look()
        return real(*args, **options)

    return function


@contextmanager
def before_each(monkeypatch, look: Callable[[], None]):
    """Looks before every call that changes what is on disk."""
    with monkeypatch.context() as patched:
        for module, name in [(os, "pwrite"), (os, "fsync"), (os, "unlink"), (Path, "replace"), (h5py.File, "close")]:
            patched.setattr(module, name, looking_first(getattr(module, name), look))
        yield


def test_at_every_instant_the_file_before_or_the_new_one_is_whole(tmp_path, monkeypatch, write_alone, tensors, specs):
    path = write_alone(tmp_path / "x.h5")
    old = contents(path)
    changed = {whole(name, t.shape): (t + 1).astype(t.dtype).reshape(t.shape) for name, t in tensors.items()}
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        with monkeypatch.context() as plain:
            plain.undo()
            with Checkpoint.open(path) as checkpoint:
                verify(checkpoint)
                now = {name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets}
        assert now in (
            {n: b for n, b in old.items() if n != CHECKSUMS},
            {s.dataset: a.tobytes() for s, a in changed.items()},
        )

    with before_each(monkeypatch, look):
        write_slabs(path, None, specs, changed, {})
    look()
    assert looks > len(tensors) + 4
    assert contents(path)["model/bias"] == (tensors["model/bias"] + 1).tobytes()


def test_writes_that_are_cut_short_go_on(tmp_path, monkeypatch, write_alone, tensors):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, bytes(data)[:77], offset))
    path = write_alone(tmp_path / "x.h5")
    with Checkpoint.open(path) as checkpoint:
        assert all(checkpoint.read_whole(name).tobytes() == t.tobytes() for name, t in tensors.items())


def test_no_argument_of_an_empty_dataset_or_rank_is_needed(tmp_path):
    """A rank may bring nothing, a slab may be empty."""
    plan = prepare(None, {"w": DatasetSpec((4, 3), "float32")}, [Slab("w", (0, 0), (4, 3)), Slab("w", (2, 0), (0, 3))])
    path = write(tmp_path / "x.h5", None, plan, lambda slab: np.ones(slab.shape, "f4"), {}).path
    assert contents(path)["w"] == np.ones(12, "f4").tobytes()


@pytest.mark.skipif(HAS_MPIO, reason="h5py with MPI")
def test_mpio_without_a_parallel_hdf5_is_refused_with_what_is_valid():
    writer.check_writer("offsets")
    with pytest.raises(ConfigError, match=r"checkpoint.writer = 'mpio' needs an h5py built .* valid: 'offsets'"):
        writer.check_writer("mpio")


@pytest.mark.skipif(not HAS_MPIO, reason="h5py without MPI")
@pytest.mark.parallel(SIZES)
def test_mpio_cuts_large_slabs_and_all_ranks_call_alike(comm, shared_path, partition, index_of, monkeypatch):
    """Ranks with many slabs, with one, with none; requests of at most 100 bytes."""
    monkeypatch.setattr(writer, "REQUEST_BYTES", 100)
    tensors = {"w": np.arange(600, dtype="f4").reshape(10, 4, 15), "s": np.array(3.0)}
    mine = scattered(comm, partition, index_of, tensors, 3)
    specs = {"w": DatasetSpec((10, 4, 15), "float32"), "s": DatasetSpec((), "float64")}
    plan, config = prepare(comm, specs, list(mine)), CheckpointConfig(writer="mpio")
    path = write(shared_path / "x.h5", comm, plan, mine.__getitem__, {}, config).path
    parallel_assert(all(contents(path)[name] == t.tobytes() for name, t in tensors.items()))
