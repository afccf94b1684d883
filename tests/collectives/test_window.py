"""Shared arrays: where they are, how long they live, and what happens when there is no room."""

from __future__ import annotations

import mmap

import laws
import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcllm.collectives import group_of, shared_zeros
from hpcllm.collectives.group import make_group
from hpcllm.collectives.window import PAGE_BYTES, _zero, find_window, free_shared
from hpcllm.errors import UserError


@pytest.mark.parallel([1, 2, 3, 5])
@pytest.mark.parametrize("dtype", laws.DTYPES)
def test_an_array_is_zero_aligned_and_seen_by_the_whole_node(comm, dtype):
    x = shared_zeros(1001, comm, dtype)
    assert x.shape == (1001,)
    assert x.dtype == dtype
    assert x.data_ptr() % 64 == 0
    assert not x.any()
    x.fill_(comm.rank + 1)
    window, offset = find_window(x.data_ptr(), x.nbytes)
    assert offset == 0
    comm.Barrier()
    for rank in range(comm.size):
        memory = np.frombuffer(window.handle.Shared_query(rank)[0], dtype=np.uint8)
        part = memory[int(window.addresses[rank]) - memory.ctypes.data :][: x.nbytes]
        assert torch.from_numpy(part.copy()).view(dtype).eq(rank + 1).all()
    comm.Barrier()
    free_shared(x, comm)


@pytest.mark.parallel([1, 3])
def test_views_are_found_and_nothing_else(comm):
    arrays = [shared_zeros(n, comm) for n in (5000, 1, 3000)]
    numbers = [find_window(x.data_ptr(), x.nbytes)[0].number for x in arrays]
    assert len(set(numbers)) == 3
    assert comm.allgather(numbers) == [numbers] * comm.size
    for x, number in zip(arrays, numbers, strict=True):
        view = x[x.numel() // 2 :]
        window, offset = find_window(view.data_ptr(), view.nbytes)
        assert (window.number, offset) == (number, x.numel() // 2 * 4)
        assert find_window(x.data_ptr(), window.memory.size + 1) == (None, 0)
    other = torch.zeros(100)
    assert find_window(other.data_ptr(), other.nbytes) == (None, 0)
    for x in arrays:
        address = x.data_ptr()
        free_shared(x, comm)
        assert find_window(address, 4) == (None, 0)


@pytest.mark.parallel([1, 2])
def test_arrays_go_with_their_communicator(comm):
    own = comm.Dup()
    address = shared_zeros(10, own).data_ptr()
    with pytest.raises(ValueError, match=r"no shared array .* \(3,\)"):
        free_shared(torch.zeros(3), own)
    kept = shared_zeros(10, comm)
    with pytest.raises(ValueError, match="no shared array of this communicator"):
        free_shared(kept, own)
    own.Free()
    assert find_window(address, 40) == (None, 0)
    free_shared(kept, comm)


@pytest.mark.parallel([2])
def test_an_empty_array_is_an_array(comm):
    assert shared_zeros(0, comm).shape == (0,)
    assert shared_zeros((3, 0), comm).shape == (3, 0)


@pytest.mark.parallel([1, 3])
def test_an_array_has_the_shape_that_was_asked_for(comm):
    x = shared_zeros((4, 3, 2), comm, torch.bfloat16)
    assert (x.shape, x.dtype) == ((4, 3, 2), torch.bfloat16)
    assert find_window(x[2].data_ptr(), x[2].nbytes)[1] == 2 * 6 * 2
    free_shared(x, comm)


@pytest.mark.parallel([1, 2, 3])
def test_too_little_memory_is_said_before_it_is_touched(comm):
    with pytest.raises(UserError, match=r"1073741824\.0 MiB of shared memory each.*MiB free; enlarge /dev/shm"):
        shared_zeros(1 << 48, comm)
    x = shared_zeros(10, comm)  # and nothing is left half done
    free_shared(x, comm)


def test_memory_that_ends_early_is_an_error_not_the_end(tmp_path):
    group = make_group(MPI.COMM_SELF)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(4 * PAGE_BYTES)
        with mmap.mmap(file.fileno(), 4 * PAGE_BYTES) as memory:
            whole = np.frombuffer(memory, dtype=np.uint8)
            whole[:] = 1
            assert _zero(whole, group) is None
            assert not whole.any()
            file.truncate(2 * PAGE_BYTES)  # a store beyond is SIGBUS, as in a full /dev/shm
            assert "memory ended after 0.0 MiB" in str(_zero(whole, group))
            del whole
    group.free()


@pytest.mark.parallel([4])
def test_each_node_has_a_window_of_its_own(comm):
    group = make_group(comm, comm.Split(comm.rank // 2))
    x = shared_zeros(10, group)
    assert find_window(x.data_ptr(), x.nbytes)[0].addresses.shape == (2,)
    group.free()
    assert find_window(x.data_ptr(), 4) == (None, 0)
    assert group_of(comm).nodes == 1
