"""The copy behind which a checkpoint is written: beside the device's computation, and in little more memory."""

from __future__ import annotations

import itertools
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from mpi4py import MPI

from hpcllm.checkpoint import background
from hpcllm.checkpoint.background import Background, LocalSlabs
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import FEEDBACK
from hpcllm.config.schema import CheckpointConfig
from hpcllm.system import host_memory

STATE = Slab("model/w", (0,), (1000,))
RESIDUALS = Slab(FEEDBACK, (0,), (77,))


def slabs(device: str) -> LocalSlabs:
    specs = {slab.dataset: DatasetSpec(slab.shape, "float32") for slab in (STATE, RESIDUALS)}
    return LocalSlabs(specs, {slab: torch.full(slab.shape, 3.0, device=device) for slab in (STATE, RESIDUALS)})


@pytest.fixture
def begun(comm, tmp_path, monkeypatch):
    """A checkpoint that has been begun, whose thread has not come to it, and what is copied."""
    jobs = []
    monkeypatch.setattr(background, "run_in_order", lambda job, *_: jobs.append(job))
    behind, held = Background(comm, CheckpointConfig(), lambda: None, lambda: ""), slabs("pretend")
    assert behind.begin(1, tmp_path / "a", held, {}) is None
    assert len(jobs) == 1
    return behind, held


def has_come(behind: Background, slab: Slab) -> bool:
    """True if the host may read that copy; else it is poison."""
    torch.accelerator.current_stream().synchronize()
    return bool((behind._copies[slab] == 3).all())


@pytest.mark.pretend
@pytest.mark.parallel([1])
def test_the_computation_does_not_wait_for_the_copy_until_an_update(begun):
    behind, held = begun
    assert not has_come(behind, STATE)
    assert has_come(behind, RESIDUALS)  # the backward pass changes those
    held.tensors[RESIDUALS].zero_()
    behind.before_update()
    held.tensors[STATE].zero_()  # unordered with the copy it would be a race
    assert has_come(behind, STATE)


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_file_has_what_the_device_had_computed_by_then(tmp_path, goes_on):
    """From a copy or from the memory itself; the thread's own stream knows nothing of the computation's."""
    behind = Background(MPI.COMM_SELF, CheckpointConfig(), lambda: None, lambda: "")
    with torch.Stream(torch.device("pretend", 0)):
        behind.begin(1, tmp_path / "a.h5", slabs("pretend"), {}, goes_on)
    behind.finish()
    with Checkpoint.open(tmp_path / "a.h5") as checkpoint:
        assert all((checkpoint.read_whole(slab.dataset) == 3).all() for slab in (STATE, RESIDUALS))


def pieces_of(sizes: list[int]) -> tuple[dict[Slab, torch.Tensor], list[int]]:
    """Copies of tensors of these bytes, and the bytes of the pieces in which they lie."""
    tensors = {Slab(str(n), (0,), (size,)): torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    copies = host_memory.host_memory({slab: x.nbytes for slab, x in tensors.items()}, pinned=False)
    storages = {copy.untyped_storage().data_ptr(): copy.untyped_storage() for copy in copies.values() if copy.nbytes}
    return copies, [storage.nbytes() for storage in storages.values()]


def rooms(sizes: list[int]) -> int:
    return sum(-(-size // 64) * 64 for size in sizes)


@hypothesis.given(st.lists(st.integers(0, 1 << 22), min_size=1, max_size=60), st.sampled_from([0, 1 << 12, 64 << 20]))
def test_the_copy_has_room_for_each_tensor_and_less_than_twice_their_bytes(sizes, piece_bytes):
    with mock.patch.object(host_memory, "PIECE_BYTES", piece_bytes):
        copies, pieces = pieces_of(sizes)
    assert all(size & (size - 1) == 0 for size in pieces)
    assert sum(pieces) < 2 * rooms(sizes) + 1
    assert [(copy.nbytes, copy.dtype) for _, copy in sorted(copies.items(), key=lambda item: int(item[0].dataset))] == [
        (size, torch.uint8) for size in sizes
    ]
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in copies.values() if copy.nbytes)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
    assert all(start % 64 == 0 for start, _ in places)


@pytest.mark.parametrize("layers", [8, 16, 22, 31])
def test_the_copy_of_a_model_s_state_leaves_little_unused(layers, monkeypatch):
    """Of a Llama of 2048 x 5632: weights of 16 bits, master and moments; all is a thousandth of its size."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 64 << 10)
    matrices = [2048 * 2048, 2048 * 256, 2048 * 256, 2048 * 2048, *3 * [2048 * 5632]]
    values = [50304 * 2048, *layers * [*matrices, 2048, 2048]]
    sizes = [n * item // 1024 for item in (2, 4, 4, 4) for n in values]
    _, pieces = pieces_of(sizes)
    assert sum(pieces) <= 1.1 * rooms(sizes)
