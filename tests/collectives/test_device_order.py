"""MPI knows no streams: what a message reads or fills, the stream must be done with, and nobody may touch it meanwhile.

The pretended device watches the order of all that happens to its memory (tests/pretend/order.h).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import emulated
import laws
import pretend
import pytest
import torch
from device_laws import DEVICE, DOORS, cases
from pretend.counts import counting
from pretend.hangs import hanging

from hpcllm.codecs import find_codec
from hpcllm.codecs.casts import Raw
from hpcllm.codecs.gpu import launch
from hpcllm.collectives import (
    allreduce,
    broadcasts,
    iallgather,
    iallreduce,
    ireduce_scatter,
    pairwise,
    ring,
    strips,
    two_step,
    worker,
)
from hpcllm.collectives.group import group_of
from hpcllm.collectives.wire import Wire
from hpcllm.collectives.worker import Crossing, Worker
from hpcllm.mpi.message_memory import DeviceMemory, StreamEvents, mpi_reads_devices, span
from hpcllm.mpi.wait import Waits, job_waits

pytestmark = [pytest.mark.pretend, pytest.mark.usefixtures("device_messages")]
MODE = os.environ.get("HPCLLM_PRETEND", "")


@pytest.fixture
def kernels(monkeypatch) -> Iterator[None]:
    """Emulated kernels for the device, where there is a compiler."""
    if why := emulated.why_not():
        pytest.skip(why)
    monkeypatch.setitem(launch.LAUNCHERS, DEVICE, lambda: emulated.EMULATOR)
    for known in (launch.launcher_of, find_codec):
        known.cache_clear()
    yield
    for known in (launch.launcher_of, find_codec):
        known.cache_clear()


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
@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [("ring", "raw"), ("two_step", "bf16"), ("native", "raw"), ("ring", "exp"), ("two_step", "mpc")],
)
@pytest.mark.usefixtures("kernels")
def test_a_wait_for_the_device_has_a_name_and_the_limit_of_its_messages(comm, algorithm, codec):
    """Of a device that hangs: in events, in what the library's sums read, in lengths that an encoding depends on."""
    laws.limited(comm)
    x = laws.values(comm.rank, 100, torch.float32).to(DEVICE)
    with hanging(DEVICE) as waits:
        DOORS["allreduce"](x, comm, codec=codec, algorithm=algorithm)
    words = f"its device to end the work before a message, rank {comm.rank}"
    assert set(waits) == {(words, group_of(comm).wire.waits.limit_s)}
    assert not job_waits.calls


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("lane", ["iallreduce", "worker"])
def test_what_others_wait_for_goes_before_the_kernels_of_the_caller(comm, monkeypatch, lane):
    """Lanes ask for streams of a higher priority, which is a lower number; one each, whatever the jobs."""
    asked, stream = [], torch.Stream

    def made(*arguments, priority=0, **words):
        asked.append(priority)
        return stream(*arguments, priority=priority, **words)

    monkeypatch.setattr(worker, "_streams", {})
    monkeypatch.setattr(torch, "Stream", made)
    x = torch.ones(1000, device=DEVICE)
    jobs = Worker(threaded=True, device=x.device)
    for _ in range(3):
        if lane == "worker":
            jobs.wait(jobs.submit(lambda: x.mul_(2)))
        else:
            iallreduce(x, comm, "raw", "ring").wait()
    assert len(asked) == 1
    assert asked[0] < 0


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("how", ["wait", "finish"])
def test_who_waits_for_a_lane_goes_on_with_what_cannot_wait(comm, how):
    """Here the lane itself waits for it, as a peer may for a message that is held; then it comes to an end."""
    went_on = threading.Event()
    jobs = Worker(threaded=True, device=torch.device(DEVICE, 0), meanwhile=went_on.set)
    found = []
    job = jobs.submit(lambda: found.append(went_on.wait(20)))
    jobs.wait(job) if how == "wait" else jobs.finish()
    assert found == [True]
    comm.Barrier()


def lands_apart(operation: str, algorithm: str, codec: str) -> bool:
    """True if messages come into memory that nothing but messages uses, and that only codecs have touched before."""
    if codec == "raw" and MODE == "open":  # some come into the very array that is being computed
        return operation in ("allreduce", "reduce_scatter") and algorithm in ("ring", "two_step", "grid")
    return (operation, algorithm) != ("alltoall", "bruck")  # which moves encodings about before it sends them


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("operation", DOORS)
def test_messages_may_come_while_the_device_makes_what_is_to_be_sent(comm, operation):
    """No receive waits for the end of the stream's queue; a send does."""
    queued = 40
    laws.limited(comm)
    for algorithm, codec, dtype in cases(operation):
        if codec not in ("raw", "bf16") or not lands_apart(operation, algorithm, codec):
            continue
        x = laws.values(comm.rank, 1000 * comm.size, dtype).to(DEVICE)
        DOORS[operation](x.clone(), comm, codec=codec, algorithm=algorithm)  # takes memory
        for _ in range(queued):
            x.mul_(1)
        with counting() as counts:
            DOORS[operation](x, comm, codec=codec, algorithm=algorithm)
        drained = [block.text for block in counts.blocks if block.longest >= queued]
        assert not [text for text in drained if "before_receive" in text or " unused" in text], (algorithm, codec)
        assert drained or (operation == "broadcast" and comm.rank), (algorithm, codec)


@pytest.mark.pretend("open")
@pytest.mark.parallel([2])
@pytest.mark.parametrize("algorithm", ["ring", "two_step", "recursive_doubling"])
def test_messages_do_not_come_into_new_memory_before_the_stream_is_done_with_what_it_was(comm, algorithm):
    """It may be that of a tensor that was given back, which work in the queue still reads."""
    laws.limited(comm)
    x = laws.values(comm.rank, 1000, torch.float32).to(DEVICE)
    for _ in range(40):
        x.mul_(1)
    with counting() as counts:
        allreduce(x, comm, "bf16", algorithm)
    assert [block.text for block in counts.blocks if block.longest >= 40 and " unused" in block.text]


@pytest.mark.parallel([2])
def test_a_receive_outside_of_a_call_waits_for_the_decoding_of_the_one_before(comm):
    """As stages of a model hand on hidden states (inference/stages.py); fixture no_races asks for the order."""
    wire, x, landed = Wire(Waits(60.0)), laws.values(comm.rank, 1000, torch.float32).to(DEVICE), []
    for _ in range(3):
        raw = wire.turn_to(x.device).staged(Raw(x.dtype))
        data = raw.encode(x, wire.memory.scratch("stage after", x.nbytes))
        y = torch.empty_like(x)
        landing = wire.landing("stage before", y, raw)
        wire.exchange(comm, data, 1 - comm.rank, landing, 1 - comm.rank, x.nbytes, lambda: "hidden states")
        raw.decode(landing, y)
        landed.append(y)
    want = laws.values(1 - comm.rank, 1000, torch.float32)
    assert all(torch.equal(y.cpu(), want) for y in landed)


@pytest.mark.pretend("open")
@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "two_step"])
def test_raw_sums_on_the_device_are_marked_once(comm, monkeypatch, algorithm):
    """Events do not grow with the messages: of a ring one and one a sum, else three a strip, whatever the ranks."""
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
    assert len(events) == {"ring": 1 + cuts * (comm.size - 1), "two_step": 3 * cuts}[algorithm]
    assert laws.bits(found.cpu()) == laws.bits(want)


STRIPED = [  # whose slots are used again and again; raw where the call itself has the device work on its messages
    (operation, algorithm, codec)
    for operation, algorithm, codecs in (
        ("allreduce", "two_step", ("raw", "bf16", "int8:256")),
        ("reduce_scatter", "two_step", ("raw", "bf16", "int8:256")),
        ("alltoall", "pairwise", ("bf16", "int8:256")),
        ("broadcast", "binomial", ("bf16", "int8:256")),
        ("broadcast", "ring", ("bf16", "int8:256")),
    )
    for codec in codecs
]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(("operation", "algorithm", "codec"), STRIPED)
def test_waits_for_all_that_the_device_was_told_do_not_grow_with_the_strips(
    comm, monkeypatch, operation, algorithm, codec
):
    """A message in memory of which nothing is noted waits for everything: none does after a slot's first use."""
    laws.limited(comm)
    for module, name in ((strips, "DEVICE_SEGMENT_VALUES"), (pairwise, "SEGMENT_VALUES"), (broadcasts, "TREE_VALUES")):
        monkeypatch.setattr(module, name, 1024)
    monkeypatch.setattr(broadcasts, "CHAIN_VALUES", 1024)
    monkeypatch.setattr(two_step, "UNDER_WAY_BYTES", 1024)
    monkeypatch.setattr(strips, "LEAST_VALUES", 100)
    unknown, wait = [], StreamEvents.wait

    def counted(self, data, *settle):
        first, last = self._overlapping(*span(data))
        unknown.append(first == last and data.nbytes > 0)
        return wait(self, data, *settle)

    monkeypatch.setattr(StreamEvents, "wait", counted)
    found = find_codec(codec, torch.float32, DEVICE)
    if codec == "int8:256" and operation == "allreduce" and not emulated.why_not():
        found = emulated.emulated(codec, torch.float32)  # which adds up and encodes in one kernel
    counts = []
    for cuts in (12, 36):
        unknown.clear()
        DOORS[operation](torch.ones(1024 * comm.size * cuts, device=DEVICE), comm, codec=found, algorithm=algorithm)
        counts.append(sum(unknown))
    assert counts[0] == counts[1]


def side_stream() -> torch.Stream:
    """A stream that comes after what was told so far."""
    stream = torch.Stream(torch.device(DEVICE, 0))
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return stream


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
@pytest.mark.parametrize("operation", ["allreduce", "alltoall"])
def test_calls_on_two_streams_use_their_memory_in_turn(comm, operation, codec):
    """One group, and so one message memory, which the last calls outgrow on the stream that did not take it."""
    x, y, longer = (torch.ones(n, device=DEVICE) for n in (10_000, 10_000, 50_000))
    side, algorithm = side_stream(), {"allreduce": "two_step", "alltoall": "pairwise"}[operation]
    call = partial(DOORS[operation], comm=comm, codec=codec, algorithm=algorithm)
    for _ in range(2):
        call(x)
        with side:
            call(y)
    with side:
        call(longer)
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
@pytest.mark.parametrize("end", ["close", "finish", "wait"])
def test_what_a_worker_has_done_comes_before_the_callers_next(end):
    worker, x = Worker(True, torch.device(DEVICE, 0)), torch.zeros(4, device=DEVICE)
    for _ in range(3):
        last = worker.submit(lambda: time.sleep(0.01) or x.add_(1))
    getattr(worker, end)(*[last] * (end == "wait"))
    assert x.add_(1).cpu().tolist() == [4.0] * 4
    worker.close()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_calls_of_all_kinds_follow_one_another_on_one_array(comm, codec):
    """What one call has noted of its memory says nothing of what the caller, or the next call, does there."""
    laws.limited(comm)
    kinds = [
        (operation, algorithm)
        for operation in DOORS
        for algorithm, of, dtype in cases(operation)
        if (of, dtype) == (codec, torch.float32)
    ]
    x = laws.values(comm.rank, 600 * comm.size, torch.float32).to(DEVICE)
    for first in kinds:
        for operation, algorithm in (first, *kinds):
            x.mul_(0.5)
            DOORS[operation](x, comm, codec=codec, algorithm=algorithm)


@pytest.mark.parallel([1])
@pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not())
def test_bytes_are_decoded_as_they_are_whatever_was_encoded_since():
    """A staged codec keeps what it last encoded on the device, which is not what lies at any other place."""
    memory = DeviceMemory(torch.device(DEVICE, 0), direct=mpi_reads_devices())
    codec = memory.staged(emulated.emulated("int8:256", torch.float32))
    x, y = (laws.values(seed, 1000, torch.float32).to(DEVICE) for seed in (1, 2))
    size, out = codec.encoded_bytes(1000), torch.empty(1000, device=DEVICE)
    parts = memory.scratch("parts", 2 * size).view(2, size)
    codec.encode(y, parts[1])
    first = codec.encode(x, memory.scratch("first", size))
    codec.decode(first, out)
    want = out.cpu()
    codec.sum_encode(parts, 0, x, memory.scratch("sum", size))
    codec.decode(first, out)
    assert torch.equal(out.cpu(), want)
