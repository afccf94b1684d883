"""MPI knows no streams: what a message reads or fills, the stream must be done with, and nobody may touch it meanwhile.

The device of these tests does everything at once, a real one later. So the order is watched: each operation on the
device is noted with the memory that it touches; what an event was recorded after, and waited for, counts as done.
"""

from __future__ import annotations

from collections.abc import Iterator

import laws
import pytest
import torch
from device_laws import DEVICE, DOORS, cases
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcllm.collectives import ring, strips
from hpcllm.mpi import buffers
from hpcllm.mpi.message_memory import DeviceMemory
from hpcllm.mpi.wait import Waits

pytestmark = [pytest.mark.pretend, pytest.mark.usefixtures("device_messages")]
Span = tuple[int, int]


class Watched(TorchDispatchMode):
    """Notes what the stream is told, and checks it against messages on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[Span]] = []  # memory of each operation
        self.done = 0  # so many of them are known to be done
        self.sent: dict[int, list[Span]] = {}  # by request
        self.coming: dict[int, list[Span]] = {}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if func.is_view or not tensors:
            return result
        spans, on_device = [span(tensor) for tensor in tensors], any(not tensor.is_cpu for tensor in tensors)
        written = [
            span(argument)
            for argument, formal in zip(args, func._schema.arguments, strict=False)
            if isinstance(argument, torch.Tensor) and formal.alias_info and formal.alias_info.is_write
        ]
        assert not meet(spans, self.coming), f"{func} touches what a message is filling"
        assert not meet(written, self.sent), f"{func} writes what a message is read from"
        if on_device:
            self.told.append(spans)
            waits = len({t.device.type for t in tensors}) > 1 and not (len(args) > 2 and args[2])
            self.done = len(self.told) if waits else self.done
        else:
            self.check(spans, f"{func} of the CPU")
        return result

    def check(self, spans: list[Span], what: str) -> None:
        late = [told for told in self.told[self.done :] if meet(spans, {0: told})]
        assert not late, f"{what}, {len(late)} operations of the stream too early"


class Event:
    """Of the stream that is watched now."""

    def __init__(self, _device=None, enable_timing=False) -> None:  # noqa: ARG002
        self.after = 0

    def record(self, _stream=None) -> None:
        self.after = len(watched().told) if watched() else 0

    def synchronize(self) -> None:
        if watched():
            watched().done = max(watched().done, self.after)

    def wait(self, _stream=None) -> None:
        pass


_watched: list[Watched] = []


def watched() -> Watched | None:
    return _watched[-1] if _watched else None


def span(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def meet(spans: list[Span], others: dict[int, list[Span]]) -> bool:
    return any(a < d and c < b for a, b in spans for other in others.values() for c, d in other)


@pytest.fixture(autouse=True)
def watch(monkeypatch) -> Iterator[Watched]:
    watched, isend, irecv, wait_for = Watched(), buffers.isend, buffers.irecv, Waits.all

    def send(comm, data, peer, tag):
        watched.check([span(data)], "a send")
        requests = isend(comm, data, peer, tag)
        watched.sent.update((id(request), [span(data)]) for request in requests)
        return requests

    def receive(comm, data, peer, tag):
        watched.check([span(data)], "a receive")
        requests = irecv(comm, data, peer, tag)
        watched.coming.update((id(request), [span(data)]) for request in requests)
        return requests

    def wait(waits, requests, what):
        wait_for(waits, requests, what)
        for request in requests:
            watched.sent.pop(id(request), None)
            watched.coming.pop(id(request), None)

    monkeypatch.setattr(buffers, "isend", send)
    monkeypatch.setattr(buffers, "irecv", receive)
    monkeypatch.setattr(Waits, "all", wait)
    monkeypatch.setattr(torch, "Event", Event)
    _watched.append(watched)
    yield watched
    _watched.clear()


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", DOORS)
def test_no_message_meets_the_stream(comm, monkeypatch, watch, operation):
    laws.limited(comm)
    monkeypatch.setattr(strips, "DEVICE_SEGMENT_VALUES", 300)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    monkeypatch.setattr(ring, "LANE_BYTES", 1 << 11)
    for algorithm, codec, dtype in cases(operation):
        if dtype == torch.float16 or codec not in ("raw", "bf16"):
            continue
        x = laws.values(comm.rank, 1000 * comm.size, dtype).to(DEVICE)
        with watch:
            for _ in range(2):
                x.mul_(1)  # what the caller has told the device just before
                DOORS[operation](x, comm, codec=codec, algorithm=algorithm)


@pytest.mark.parallel([2])
def test_a_forgotten_wait_is_found(comm, monkeypatch, watch):
    monkeypatch.setattr(DeviceMemory, "before_send", lambda *_: None)
    with watch, pytest.raises(AssertionError, match=r"a send, .* too early"):
        DOORS["allreduce"](torch.ones(10_000, device=DEVICE), comm, "bf16", "two_step")
    comm.Barrier()
