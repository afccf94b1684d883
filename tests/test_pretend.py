"""Each fault that the pretended device and its messages watch for is found, and named with both of its lines.

A fault is a function: `mended` has what it lacks, and then there is none. Where the CPU would read what is not there
yet, it reads poison.
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pretend
import pytest
import torch
from mpi4py import MPI
from pretend.autoload import FAULTY
from pretend.counts import counting, none_denied

pytestmark = pytest.mark.pretend
DEVICE, N = "pretend", 1000
SIDES = re.compile(r"(.*)\n    now: (.*)\n    before: (.*)", re.DOTALL)
RACE, FREED, MEETS = "race", "memory is freed while it is used", "a message meets memory in use"


def pinned() -> torch.Tensor:
    return torch.zeros(N, pin_memory=True)


def side_stream() -> torch.Stream:
    """A stream that comes after what was told so far."""
    stream = torch.Stream(torch.device(DEVICE, 0))
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return stream


def join(stream: torch.Stream) -> None:
    torch.accelerator.current_stream(stream.device).wait_stream(stream)


def receive_is_read(mended: bool) -> None:
    landing, sent = pinned(), np.ones(N, np.float32)
    requests = [MPI.COMM_SELF.Irecv(landing.numpy(), 0, 3), MPI.COMM_SELF.Isend(sent, 0, 3)]
    assert landing.isnan().all()
    if mended:
        MPI.Request.Waitall(requests)
    taken = landing.to(DEVICE)
    MPI.Request.Waitall(requests)
    assert taken.cpu().isnan().all() != mended
    assert (landing == 1).all()


def receive_is_written(mended: bool) -> None:
    landing, sent = np.zeros(N, np.float32), np.ones(N, np.float32)
    requests = [MPI.COMM_SELF.Irecv(landing, 0, 3), MPI.COMM_SELF.Isend(sent, 0, 3)]
    if not mended:
        landing[3] = 0
    MPI.Request.Waitall(requests)


def send_is_changed(mended: bool) -> None:
    landing, sent = np.zeros(N, np.float32), np.ones(N, np.float32)
    requests = [MPI.COMM_SELF.Irecv(landing, 0, 3), MPI.COMM_SELF.Isend(sent, 0, 3)]
    if not mended:
        sent[3] = 0
    MPI.Request.Waitall(requests)
    assert landing[3] == mended  # the bytes left late


def message_meets_a_copy(mended: bool) -> None:
    x, host, event = torch.ones(N, device=DEVICE), pinned(), torch.Event(torch.device(DEVICE, 0))
    host.copy_(x, non_blocking=True)
    event.record()
    assert host.isnan().all()
    if mended:
        event.synchronize()
        assert (host == 1).all()
    requests = [MPI.COMM_SELF.Isend(host.numpy(), 0, 3), MPI.COMM_SELF.Irecv(np.empty(N, np.float32), 0, 3)]
    event.synchronize()
    MPI.Request.Waitall(requests)


def library_meets_a_copy(mended: bool) -> None:
    x, host, event = torch.ones(N, device=DEVICE), pinned(), torch.Event(torch.device(DEVICE, 0))
    host.copy_(x, non_blocking=True)
    event.record()
    if mended:
        event.synchronize()
    MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, host.numpy())
    event.synchronize()


def library_is_not_waited_for(mended: bool) -> None:
    host = pinned()
    request = MPI.COMM_SELF.Iallgather(np.ones(N, np.float32), host.numpy())
    if mended:
        request.Wait()
    host.to(DEVICE)
    request.Wait()
    assert (host == 1).all()


def memory_of_a_message_is_freed(mended: bool) -> None:
    host, landing = pinned(), np.empty(N, np.float32)
    requests = [MPI.COMM_SELF.Irecv(landing, 0, 3), MPI.COMM_SELF.Isend(np_of_nobody(host), 0, 3)]
    if mended:
        MPI.Request.Waitall(requests)
    del host
    requests[1].uses = requests[1].uses if mended else ()  # what is there now is not to be looked at
    MPI.Request.Waitall(requests)


def np_of_nobody(tensor: torch.Tensor) -> MPI.buffer:
    """Memory of a tensor that nobody keeps, as a device's is handed over."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def streams_meet(mended: bool) -> None:
    x, side = torch.zeros(N, device=DEVICE), side_stream()
    with side:
        x.add_(1)
    if mended:
        join(side)
    x.mul_(2)
    join(side)


def stream_is_not_recorded(mended: bool) -> None:
    side = side_stream()
    with side:
        lent = torch.ones(N, device=DEVICE)
    join(side)
    taken = lent + 1
    if mended:
        lent.record_stream(torch.accelerator.current_stream(taken.device))
    del lent


def lanes_meet(mended: bool) -> None:
    x, lanes = torch.zeros(N, device=DEVICE), [side_stream(), side_stream()]

    def work(lane: torch.Stream) -> None:
        with lane:
            x.add_(1)

    with ThreadPoolExecutor(2) as executor:
        executor.submit(work, lanes[0]).result()
        if mended:
            lanes[1].wait_stream(lanes[0])
        executor.submit(work, lanes[1]).result()
    join(lanes[0])
    join(lanes[1])


def thread_is_not_joined(mended: bool) -> None:
    x, lane, event = torch.zeros(N, device=DEVICE), side_stream(), torch.Event(torch.device(DEVICE, 0))

    def work() -> None:
        with lane:
            x.add_(1)
        event.record(lane)

    with ThreadPoolExecutor(1) as executor:
        job = executor.submit(work)
        while not job.done():  # tells nothing of what the thread did
            time.sleep(0.001)
        if mended:
            job.result()
        event.wait(torch.accelerator.current_stream(x.device))
        job.result()
    x.mul_(2)


# what is said, and the lines: now, before. PyTorch frees without the GIL, so "now" is the last line seen before that.
FAULTS: dict[Callable[[bool], None], tuple[str, str, str]] = {
    receive_is_read: (RACE, "landing.to(DEVICE)", "Irecv"),
    receive_is_written: ("memory of a receive was written before its wait", "Waitall", "Irecv"),
    send_is_changed: ("memory of a send changed before its wait", "Waitall", "Isend"),
    message_meets_a_copy: (MEETS, "Isend", "host.copy_"),
    library_meets_a_copy: (MEETS, "Allreduce", "host.copy_"),
    library_is_not_waited_for: (RACE, "host.to(DEVICE)", "Iallgather"),
    memory_of_a_message_is_freed: (FREED, "Isend", "Isend"),
    streams_meet: (RACE, "x.mul_(2)", "x.add_(1)"),
    stream_is_not_recorded: (FREED, "lent + 1", "lent + 1"),
    lanes_meet: (RACE, "x.add_(1)", "x.add_(1)"),
    thread_is_not_joined: ("an event of another thread, which was not waited for", "event.wait", "event.record"),
}


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "nonzero": torch.nonzero,
    "masked_select": lambda x: x.masked_select(x > 3),
    "index by a mask": lambda x: x[x > 3],
    "_index_put_impl_ by a mask": lambda x: x.index_put_((x > 3,), x[:1]),
    "scatter_add": lambda x: x.scatter_add_(0, x.long(), x.clone()),
    "index_add": lambda x: x.index_add_(0, x.long(), x.clone()),
    "_unique2": torch.unique,
}


def line_of(side: str) -> str:
    """The innermost line of this file on one side of a fault."""
    number = re.search(rf"{re.escape(__file__)}:(\d+)", side)
    return linecache.getline(__file__, int(number[1])) if number else side


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_with_both_of_its_sides(fault):
    fault(True)
    assert not pretend.take_faults()
    fault(False)
    what, now, before = FAULTS[fault]
    sides = [match.groups() for text in pretend.take_faults() if (match := SIDES.match(text))]
    assert any(said == what and now in line_of(one) and before in line_of(other) for said, one, other in sides), sides


def test_a_thread_that_is_not_joined_is_named_once_for_each_pair_of_lines():
    for _ in range(3):
        streams_meet(False)
    assert len(pretend.take_faults()) == 1


@pytest.mark.may_wait
@pytest.mark.parametrize("name", WAITING)
def test_what_makes_the_host_wait_inside_cuda_is_denied(name):
    x, places = torch.arange(8.0, device=DEVICE), torch.arange(8, device=DEVICE)
    with pytest.raises(AssertionError, match=name), none_denied():
        WAITING[name](x)
    with none_denied():
        x.index_select(0, places)


def test_counts_within_counts_are_the_same():
    x = torch.arange(8.0, device=DEVICE)
    with counting() as outer:
        x.add_(1)
        with counting() as inner:
            x.add_(1).cpu()
        x.add_(1)
    assert inner.operators == {"add": 1, "copy": 1}
    assert outer.operators == {"add": 3, "copy": 1}
    assert (inner.to_host, inner.moved_bytes) == ((1, 32), 3 * 32)  # an addition in place reads and writes
    assert (outer.to_host, outer.moved_bytes) == ((1, 32), 7 * 32)
    assert [block.times for block in inner.blocks] == [block.times for block in outer.blocks] == [1]


def test_completions_come_in_any_order():
    """Of messages that are tested together, and not as late as each other."""
    orders = set()
    for _ in range(20):
        landings = np.zeros((4, 8), np.int64)
        receives = [MPI.COMM_SELF.Irecv(landings[tag], 0, tag) for tag in range(4)]
        sends = [MPI.COMM_SELF.Isend(np.full(8, tag), 0, tag) for tag in range(4)]
        order: list[int] = []
        while len(order) < 4:
            order += [tag for tag in range(4) if tag not in order and receives[tag].Test()]
        orders.add(tuple(order))
        MPI.Request.Waitall(sends)
        assert (landings == np.arange(4)[:, None]).all()
    assert len(orders) > 1


PROGRAM = """
import sys
import numpy as np
import torch
from mpi4py import MPI

def main(is_faulty):
    sent, landing = np.ones(10), np.zeros(10)
    requests = [MPI.COMM_SELF.Irecv(landing, 0), MPI.COMM_SELF.Isend(sent, 0)]
    if is_faulty:
        sent[0] = 2
    MPI.Request.Waitall(requests)
    if is_faulty:
        x, side = torch.zeros(9, device="pretend"), torch.Stream(torch.device("pretend", 0))
        with side:
            x.add_(1)
    print("done")

main(sys.argv[1] == "faulty")
"""


@pytest.mark.parametrize("is_faulty", [True, False])
def test_a_process_that_a_test_starts_is_watched_too(tmp_path, is_faulty):
    (tmp_path / "tests").mkdir()
    program = tmp_path / "tests" / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), "faulty" if is_faulty else "right"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n"
    assert done.returncode == (FAULTY if is_faulty else 0), done.stderr
    for said in ("memory of a send changed", "program.py:9 main", "program.py:12 main", "race", "program.py:16 main"):
        assert (said in done.stderr) == is_faulty
