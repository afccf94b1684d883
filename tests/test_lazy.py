"""Operations of the pretended device are late: who forgets a wait has wrong bytes, whether or not a race is reported.

Each law is tried with its wait, which gives the values of the CPU, and without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pretend
import pytest
import torch

from hpcllm.mpi import buffers
from hpcllm.mpi.wait import Waits

pytestmark = pytest.mark.pretend
DEVICE = "pretend"
SEEDS = range(6)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(autouse=True)
def reports_are_ignored(no_races) -> Iterator[None]:  # noqa: ARG001
    yield
    pretend.take_faults()


def streams(count: int) -> list[torch.Stream]:
    return [torch.Stream(torch.device(DEVICE, 0)) for _ in range(count)]


def values(chance: random.Random) -> torch.Tensor:
    """Positive ones, which poison is not, of a random shape and dtype."""
    shape = [chance.randint(1, 9) for _ in range(chance.randint(1, 3))]
    drawn = torch.tensor(chance.choices(range(1, 8), k=torch.Size(shape).numel()))
    return drawn.reshape(shape).to(chance.choice(DTYPES))


def hand_over(chance: random.Random, before: torch.Stream, after: torch.Stream) -> None:
    """One of the ways in which `after` waits for `before`."""
    event = torch.Event(DEVICE)
    event.record(before)
    ways: tuple[Callable[[], object], ...] = (
        lambda: event.wait(after),
        lambda: after.wait_stream(before),
        event.synchronize,
        before.synchronize,
        torch.accelerator.synchronize,
    )
    chance.choice(ways)()


STEPS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x + 1,
    lambda x: x.mul_(2),
    lambda x: x.flatten()[: x.numel() // 2 + 1] * 3,
    lambda x: torch.stack([x, x])[:, ..., :],
    lambda x: torch.empty_like(x).copy_(x),
    lambda x: torch._foreach_add([x], 2)[0],
    lambda x: x.t() + 1 if x.dim() == 2 else x - 1 + 2,
)


def chain(seed: int, forgotten: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps on changing streams, each of what the one before it has made: the result, and the CPU's.

    forgotten: the step that does not wait.
    """
    chance = random.Random(seed)
    want = values(chance)
    x, here, pool = want.to(DEVICE), torch.accelerator.current_stream(DEVICE), streams(3)
    kept = [x]  # nothing is freed while another stream has yet to read it
    for number in range(LENGTH):
        there = chance.choice([stream for stream in pool if stream != here])
        way, step = random.Random(chance.random()), chance.choice(STEPS)
        if number != forgotten:
            hand_over(way, here, there)
        with there:
            x = step(x)
        kept.append(x)
        want, here = step(want), there
    here.synchronize()
    return x.cpu(), want


LENGTH = 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_does_not_wait_for_another_computes_of_poison(seed):
    result, want = chain(seed)
    assert torch.equal(result, want)
    for forgotten in range(1, LENGTH):  # step 0 follows a copy that the host has waited for
        result, want = chain(seed, forgotten)
        assert not (result == want).any(), f"without the wait of step {forgotten}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_copy_to_the_host_is_poison_until_the_host_has_waited(seed, is_strided):
    chance = random.Random(seed)
    (side,) = streams(1)
    for _ in range(4):
        want = values(chance)
        room = torch.zeros(*want.shape, 2, dtype=want.dtype).pin_memory()
        host = room[..., 1] if is_strided else room.flatten()[: want.numel()].view(want.shape)
        x = want.to(DEVICE)
        with side:
            host.copy_(x + 1, non_blocking=True)
            x.mul_(2)  # knows of the copy, but the host does not
        assert not (host == want + 1).any()
        if is_strided:
            assert not room[..., 0].any(), "what lies between is the host's"
        hand_over(chance, side, torch.accelerator.current_stream(DEVICE))
        side.synchronize()
        assert torch.equal(host, want + 1)


Disturb = Callable[[torch.Tensor], object]


def result_of_reader(seed: int, waits: bool, disturb: Disturb, pins: bool = False) -> list[bool]:
    """A stream's input is disturbed by another one, or by the host: is what it wrote right, and what came of that?"""
    (side,), chance = streams(1), random.Random(seed)
    want = values(chance)
    source = want.clone().pin_memory() if pins else want.to(DEVICE)
    with side:
        made = torch.empty_like(source, device=DEVICE).copy_(source, non_blocking=True)
        later = made + 1
    if waits:
        side.synchronize()
    disturb(source)
    torch.accelerator.synchronize()
    return [bool((made.cpu() == want).any()), bool((later.cpu() == want + 1).any())]


def receive(x: torch.Tensor) -> None:
    pretend.native().end_message(pretend.native().begin_message(x.data_ptr(), x.nbytes, True))


DISTURBED: dict[str, Disturb] = {
    "in place": lambda x: x.add_(1),
    "by a copy": lambda x: x.copy_(torch.zeros(x.shape, dtype=x.dtype)),
    "a part": lambda x: x.view(-1)[-1:].add_(1),
    "by a message": receive,
    "free": lambda x: x.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", DISTURBED)
def test_who_writes_or_frees_what_a_stream_has_yet_to_read_spoils_what_that_writes(seed, how):
    assert result_of_reader(seed, True, DISTURBED[how]) == [True, True]
    assert result_of_reader(seed, False, DISTURBED[how]) == [False, False]


@pytest.mark.parametrize("seed", SEEDS)
def test_pinned_memory_that_is_written_before_its_copy_was_waited_for_spoils_the_copy(seed):
    assert result_of_reader(seed, True, lambda x: x.add_(1), pins=True) == [True, True]
    assert result_of_reader(seed, False, lambda x: x.add_(1), pins=True) == [False, False]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_two_writes_without_order_leave_poison(seed, waits):
    chance = random.Random(seed)
    first, second = streams(2)
    want = values(chance)
    x, y, out = want.to(DEVICE), (want + 1).to(DEVICE), torch.empty_like(want, device=DEVICE)
    with first:
        out.copy_(x)
    if waits:
        hand_over(chance, first, second)
    with second:
        out.copy_(y)
    torch.accelerator.synchronize()
    assert torch.equal(out.cpu(), want + 1) == waits
    assert (out.cpu() == want + 1).any() == waits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_a_write_that_comes_after_memory_was_freed_spoils_its_next_owner(seed, waits):
    (side,) = streams(1)
    want = values(random.Random(seed))
    x, own = torch.zeros_like(want, device=DEVICE), want.to(DEVICE)
    with side:
        x.add_(1)
    if waits:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    next_ = own + 1
    assert next_.data_ptr() == address
    torch.accelerator.synchronize()
    assert (next_.cpu() == want + 1).any() == waits


@pytest.mark.parallel([2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_that_did_not_wait_for_its_stream_is_poison(comm, seed):
    """From memory of the device where MPI reads that, else from pinned memory that it is copied to."""
    (side,), chance = streams(1), random.Random(seed)
    is_open, peer = pretend.is_open(), 1 - comm.rank
    for waits in (True, False):
        want = values(chance)
        x, landing = want.to(DEVICE), torch.empty_like(want)
        host = torch.empty_like(want).pin_memory()
        with side:
            made = x + 1
            host.copy_(made, non_blocking=True)
            x.add_(made)
        if waits:
            side.synchronize()
        coming = buffers.irecv(comm, landing, peer, 0)
        leaving = buffers.isend(comm, made if is_open else host, peer, 0)
        Waits(60.0).all([*coming, *leaving], lambda: "the other rank")
        side.synchronize()
        assert torch.equal(landing, want + 1) == waits
        assert (landing == want + 1).any() == waits
