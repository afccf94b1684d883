"""MPI knows no streams: what a message reads or fills, the stream must be done with, and nobody may touch it meanwhile.

The pretended device watches the order of all that happens to its memory (tests/pretend/order.h).
"""

from __future__ import annotations

import time

import laws
import pretend
import pytest
import torch
from device_laws import DEVICE, DOORS, cases

from hpcllm.collectives import allreduce, iallgather, iallreduce, ireduce_scatter, ring, strips
from hpcllm.collectives.group import group_of
from hpcllm.collectives.worker import Crossing, Worker
from hpcllm.mpi.message_memory import DeviceMemory, StreamEvents
from hpcllm.mpi.stuck_calls import report_calls
from hpcllm.mpi.wait import job_waits

pytestmark = [pytest.mark.pretend, pytest.mark.usefixtures("device_messages")]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", DOORS)
def test_no_message_meets_the_stream(comm, monkeypatch, operation):
    """Strips are small, so that there are many; the fixture no_races asks for races at the end."""
    laws.limited(comm)
    monkeypatch.setattr(strips, "DEVICE_SEGMENT_VALUES", 300)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    for name in ("LANE_BYTES", "DEVICE_LANE_BYTES"):
        monkeypatch.setattr(ring, name, 1 << 11)
    for algorithm, codec, dtype in cases(operation):
        if dtype == torch.float16 or codec not in ("raw", "bf16"):
            continue
        x = laws.values(comm.rank, 1000 * comm.size, dtype).to(DEVICE)
        for _ in range(2):
            x.mul_(
                2
            )  # what the caller has told the device just before; and the bytes differ from those of the last call
            DOORS[operation](x, comm, codec=codec, algorithm=algorithm)


@pytest.mark.parallel([2])
def test_a_forgotten_wait_is_found(comm, monkeypatch):
    monkeypatch.setattr(DeviceMemory, "before_send", lambda *_: None)
    DOORS["allreduce"](torch.ones(10_000, device=DEVICE), comm, "bf16", "two_step")
    assert any("now: send" in fault for fault in pretend.take_faults())
    comm.Barrier()


@pytest.mark.parallel([2])
def test_a_forgotten_crossing_is_found(comm, monkeypatch):
    monkeypatch.setattr(Crossing, "back", lambda _: None)
    iallreduce(torch.ones(10_000, device=DEVICE), comm, "bf16", "two_step").wait().mul_(2)
    assert pretend.take_faults()
    comm.Barrier()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_wait_for_the_device_has_a_name_and_the_limit_of_its_messages(comm, monkeypatch, codec):
    """Of a device that hangs; seconds of such a wait are not those of messages."""
    said = set()

    class Hanging:
        def record(self, _):
            pass

        def synchronize(self):
            torch.accelerator.synchronize(DEVICE)
            said.add(report_calls(job_waits, time.perf_counter() + 1000))

    laws.limited(comm)
    x = laws.values(comm.rank, 100, torch.float32).to(DEVICE)
    monkeypatch.setattr(StreamEvents, "_recorded", lambda _: Hanging())
    DOORS["allreduce"](x, comm, codec=codec, algorithm="ring")
    monkeypatch.undo()
    limit_s = group_of(comm).wire.waits.limit_s
    words = f"waited {limit_s:g} s for its device to end the work before a message, rank {comm.rank};"
    assert len(said) == 1
    assert words in said.pop()
    assert not report_calls(job_waits, time.perf_counter() + 1000)


@pytest.mark.pretend("open")
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "two_step"])
def test_raw_sums_on_the_device_are_marked_once(comm, monkeypatch, algorithm):
    """Events do not grow with the messages: of a ring two and one a sum, else three a strip, whatever the ranks."""
    cuts, events, recorded = 5, [], StreamEvents._recorded
    laws.limited(comm)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    monkeypatch.setattr(strips, "DEVICE_SEGMENT_VALUES", 1000)
    monkeypatch.setattr(ring, "DEVICE_LANE_BYTES", 4000)
    monkeypatch.setattr(StreamEvents, "_recorded", lambda self: events.append(1) or recorded(self))
    x = laws.values(comm.rank, 1000 * comm.size * cuts, torch.float32)
    want = DOORS["allreduce"](x.clone(), comm, codec="raw", algorithm=algorithm)
    assert not events
    found = DOORS["allreduce"](x.to(DEVICE), comm, codec="raw", algorithm=algorithm)
    assert len(events) == {"ring": 2 + cuts * (comm.size - 1), "two_step": 1 + 3 * cuts}[algorithm]
    assert laws.bits(found.cpu()) == laws.bits(want)


def side_stream() -> torch.Stream:
    """A stream that comes after what was told so far."""
    stream = torch.Stream(torch.device(DEVICE, 0))
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return stream


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_calls_on_two_streams_use_their_memory_in_turn(comm, codec):
    """One group, and so one message memory, which the last calls outgrow on the stream that did not take it."""
    x, y, longer = (torch.ones(n, device=DEVICE) for n in (10_000, 10_000, 50_000))
    side = side_stream()
    for _ in range(2):
        allreduce(x, comm, codec, "two_step")
        with side:
            allreduce(y, comm, codec, "two_step")
    with side:
        allreduce(longer, comm, codec, "two_step")
    torch.accelerator.current_stream(x.device).wait_stream(side)  # before y is forgotten here


@pytest.mark.parallel([2])
def test_what_a_lane_has_made_may_be_forgotten_at_once(comm):
    """The memory of a result is the lane's, and the caller's stream has yet to read it."""
    gathered = iallgather(torch.ones(5000, device=DEVICE), comm).wait()
    gathered.add_(1)
    del gathered


@pytest.mark.parallel([2])
def test_what_a_lane_reads_may_be_forgotten_at_once(comm):
    handle = ireduce_scatter(torch.ones(10_000, device=DEVICE), comm, "bf16", "two_step")
    while not handle.done():  # the job's own reference is gone, but its stream is not waited for
        time.sleep(0.001)
    handle.wait()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("end", [Worker.close, Worker.finish])
def test_what_a_worker_has_done_comes_before_the_callers_next(end):
    worker, x = Worker(True, torch.device(DEVICE, 0)), torch.zeros(4, device=DEVICE)
    for _ in range(3):
        worker.submit(lambda: time.sleep(0.01) or x.add_(1))
    end(worker)
    assert x.add_(1).cpu().tolist() == [4.0] * 4
