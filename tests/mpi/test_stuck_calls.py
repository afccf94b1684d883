"""Calls of MPI that do not return are found, named and ended; computations and polite waits are not taken for them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.mpi import meeting_comm, stuck_calls, wait
from hpcllm.mpi.meeting_comm import COLLECTIVES, MAKERS, MeetingComm, plain
from hpcllm.mpi.stuck_calls import LOOKS, StuckCalls
from tests.system.test_job import ROOT, environment, launcher, run_script

LIMIT_S = 60.0
STOPPED = """
import os, signal, sys
import numpy
where = sys.argv[1]
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
def stop_at(here):
    if where == here and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
from hpcllm.system.job import run_job
stop_at("MPI_Init")
def command(world):
    from hpcllm.mpi import watchdog
    from hpcllm.mpi.collective_errors import on_root
    from hpcllm.mpi.wait import job_waits
    watchdog.GRACE_S = job_waits.limit_s = 0.6  # six times that where a rank may be at work
    stop_at("on_root")
    on_root(world, lambda: 1)
    stop_at("bcast")
    world.bcast(1)
    part = world.Split(0, world.rank)
    stop_at("Allreduce")
    part.Allreduce(numpy.ones(1), numpy.ones(1))
    stop_at("Dup")
    part.Dup()
    return 0
code = run_job(command, 0.6 if where == "MPI_Init" else 15.0)  # to start MPI may take seconds on a busy machine
stop_at("MPI_Finalize")
sys.exit(code)
"""


LATER = [
    pytest.param(name, marks=pytest.mark.full(reason="waits for 5 s, more than the others"))
    for name in ("bcast", "Allreduce", "Dup")
]


@pytest.mark.parametrize("where", ["MPI_Init", "on_root", *LATER, "MPI_Finalize"])
def test_a_rank_that_stops_at_any_time_ends_the_job_with_its_words(where):
    start = time.monotonic()
    done = run_script(STOPPED, 2, where)
    assert done.returncode != 0
    if "MPI" in where:
        said = rf"Timeout \((.|\n)* in hpcllm: rank 0 in {where}, which returns once all ranks have come to it"
    else:
        said = r"rank 1 \(.*\) has not answered"
    assert re.search(said, done.stderr), done.stderr
    assert time.monotonic() - start < 20


LEFT = """
import os, signal, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.Finalize()
if rank in map(int, sys.argv[1:]):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(
    MPI.get_vendor()[0] != "MPICH", reason="Open MPI's mpirun ends by itself, or is ended, after an abort"
)
@pytest.mark.full(reason="waits for a quarter of a minute whether something ends")
def test_a_rank_that_is_stopped_after_it_has_left_mpi_does_not_keep_mpirun(tmp_path):
    assert left_with(tmp_path / "said", "1", "2") not in (0, None)
    found = re.search(r"all other ranks have ended.* killed:((?: \d+)+)", (tmp_path / "said").read_text())
    assert found, (tmp_path / "said").read_text()
    assert len(found[1].split()) == 2
    assert left_with(tmp_path / "nothing", "0", "1", "2") is None  # who stops all of them may let them go on


def left_with(said: Path, *stopped: str) -> int | None:
    """Exit code of a job whose ranks leave MPI, after which some stop; None: it stays, and goes on when they do."""
    command = ["bash", "jobscripts/local/mpirun.sh", "3", sys.executable, "-c", LEFT, *stopped]
    with open(said, "a") as file:
        job = subprocess.Popen(
            command, env=environment() | {"HPCLLM_STOPPED_S": "1"}, cwd=ROOT, stdout=file, stderr=file
        )
    try:
        return job.wait(12)
    except subprocess.TimeoutExpired:
        for rank in stopped_below(job.pid):
            os.kill(rank, signal.SIGCONT)
        assert job.wait(10) == 0
        return None
    finally:
        for rank in stopped_below(job.pid):
            os.kill(rank, signal.SIGKILL)


def stopped_below(pid: int) -> list[int]:
    """Processes that this one has started, or those have, which are stopped."""
    children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    below = [rank for child in children for rank in stopped_below(child)]
    return below + [child for child in children if "T (stopped)" in Path(f"/proc/{child}/status").read_text()]


SMALL_CALLS = """
import os, signal, sys
import torch
from hpcllm.collectives import operations
from hpcllm.collectives.group import make_group
from hpcllm.mpi import watchdog
from hpcllm.mpi.wait import Waits, job_waits
from hpcllm.system.job import run_job
operation, stopped = sys.argv[1], int(sys.argv[2])
def command(world):
    watchdog.GRACE_S = 0.6
    group, x = make_group(world), torch.ones(world.size * 256)
    group.wire.waits = Waits(0.6, observer=job_waits.observer, foreground=True)
    for number in range(10):
        if number == 5 and world.rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        getattr(operations, operation)(x, group, *[stopped] * (operation == "broadcast"))
        assert all(plan.algorithm == "native" for plan in group.plans.values())
    return 0
sys.exit(run_job(command))
"""


OTHERS = [
    pytest.param(name, marks=pytest.mark.full(reason="waits for 7 s, as an allreduce does"))
    for name in ("reduce_scatter", "allgather", "alltoall", "broadcast")
]


@pytest.mark.full(reason="jobs that wait for their limit, a tenth of a minute each", in_ci=True)
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("operation", ["allreduce", *OTHERS])
def test_a_small_call_of_the_library_blocks_and_is_named_all_the_same(operation, stopped):
    """Within the limit of its waits, not WORK times it, by a rank that is in such a call, as those that it asks are."""
    start = time.monotonic()
    done = run_script(SMALL_CALLS, 3, operation, str(stopped))
    assert done.returncode != 0
    name = {"broadcast": "bcast"}.get(operation, operation)
    size_bytes = 3 * 1024 * (3 if operation == "allgather" else 1)
    awaits = rf"the library's {name} of {size_bytes} bytes, ranks 0-2"
    assert re.search(rf"rank {stopped} \(process .*\) has not answered", done.stderr), done.stderr
    assert re.search(awaits, done.stderr), done.stderr
    assert time.monotonic() - start < 20


def test_a_rank_that_crashes_in_mpi_init_says_so_and_not_that_it_waited_too_long():
    """The other one does not come, so that MPI_Init is where the signal finds it."""
    script = """
import os, subprocess, sys, time
from hpcllm.system import diagnostics
from hpcllm.system.job import launched_rank, run_job
if launched_rank() == "0":
    time.sleep(300)
diagnostics.start()
subprocess.Popen(["sh", "-c", f"sleep 3; kill -SEGV {os.getpid()}"], stdout=subprocess.DEVNULL)
run_job(lambda world: 0)
"""
    done = run_script(script, 2)
    assert done.returncode != 0
    assert re.search(r"Segmentation fault(.|\n)* in hpcllm: rank 1 in MPI_Init, ", done.stderr), done.stderr
    assert "Timeout" not in done.stderr


def test_every_blocking_collective_of_a_command_has_a_name_and_a_limit():
    """MPI has a twin of each that does not block: by these they are known."""
    own = {name for name in dir(MPI.Intracomm) if f"I{name.lower()}" in dir(MPI.Intracomm)}
    own = {name for name in own if "end" not in name.lower() and "recv" not in name.lower() and "probe" not in name}
    assert own - {"Probe", "Agree", "Flush_buffer", "Shrink"} <= {*COLLECTIVES, *MAKERS}
    comm = MeetingComm(MPI.COMM_SELF)
    for made in (comm.Dup(), comm.Split(0, 0), comm.Split_type(MPI.COMM_TYPE_SHARED), comm.Create(comm.group)):
        assert type(made) is MeetingComm
        assert made.allreduce(3) == 3
        assert type(plain(made)) is MPI.Intracomm
        made.Free()


def looked_at(block: Callable[[threading.Event], None], end: threading.Event) -> str:
    """What is found of a thread that runs the block until the end, which is set once it was looked for long enough."""
    calls, found = StuckCalls(), ""
    thread = threading.Thread(target=block, args=(end,), daemon=True)
    thread.start()
    for _ in range(3 * LOOKS):
        time.sleep(0.01)
        found = found or calls.look(0.1, time.monotonic())
    end.set()
    thread.join()
    return found


def test_what_takes_long_but_is_no_call_of_mpi_is_left_alone():
    def compute(end: threading.Event) -> None:
        while not end.is_set():
            np.linalg.svd(np.ones((300, 300)))

    def poll(end: threading.Event) -> None:
        wait.Waits(60.0).until(end.is_set, lambda: "the end")

    for block in (compute, poll, threading.Event.wait):
        assert looked_at(block, threading.Event()) == ""


def late_receive(tmp_path, monkeypatch, comm: MPI.Intracomm, call: str) -> str:
    """What is found of a thread in `comm.CALL(into, 0, tag=7)`, which takes a message that is sent at the end only."""
    source = tmp_path / "a place.py"
    source.write_text(f"def receive(comm, into):\n    comm.{call}(\n        into, 0, tag=7)\n")
    monkeypatch.setattr(stuck_calls, "PACKAGE", str(tmp_path))
    names: dict[str, Callable[..., None]] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    end = threading.Event()
    sender = threading.Thread(target=lambda: (end.wait(), MPI.COMM_SELF.Send(np.ones(1), 0, 7)))
    sender.start()
    found = looked_at(lambda _: names["receive"](comm, np.empty(1)), end)
    sender.join()
    return found


def test_a_blocking_call_is_named_by_its_source(tmp_path, monkeypatch):
    found = late_receive(tmp_path, monkeypatch, MPI.COMM_SELF, "Recv")
    assert re.search(r"has not returned for 0 s from `comm.Recv\( into, 0, tag=7\)` \(a place.py:", found), found


def test_a_collective_that_hangs_though_all_have_come_is_named_by_who_called_it(tmp_path, monkeypatch):
    """A bcast whose MPI call is a receive, as no collective of one rank hangs."""
    monkeypatch.setattr(meeting_comm, "MPI", SimpleNamespace(Intracomm=SimpleNamespace(bcast=MPI.Intracomm.Recv)))
    monkeypatch.setattr(MeetingComm, "bcast", meeting_comm._meeting("bcast"))
    found = late_receive(tmp_path, monkeypatch, MeetingComm(MPI.COMM_SELF), "bcast")
    assert re.search(r"has not returned for 0 s from `comm.bcast\( into, 0, tag=7\)` \(a place.py:", found), found


def test_an_abort_that_does_not_return_ends_the_process_all_the_same(tmp_path):
    """MPI_Abort keeps the GIL: so does this sleep."""
    (tmp_path / "aborted").touch()
    done = ended_in(f"job.ABORT_S = 0.5; job._end_soon(3); {KEEPS_THE_GIL}", HPCLLM_ABORTED=str(tmp_path / "aborted"))
    assert done.returncode == 1
    assert (tmp_path / "aborted").read_text() == "3\n"


@pytest.mark.parametrize("has_launch_script", [True, False])
def test_a_call_that_takes_too_long_says_so_to_the_launch_script_or_else_to_the_user(tmp_path, has_launch_script):
    """Open MPI's mpirun may stay after such an end, so that its launch script has to know."""
    path = tmp_path / "aborted"
    path.write_text("running\n")
    call = f"job.call_within(0.5, 'some call', lambda: {KEEPS_THE_GIL})"
    done = ended_in(call, HPCLLM_ABORTED=str(path) if has_launch_script else "")
    told, silent = (path.read_text(), done.stderr) if has_launch_script else (done.stderr, path.read_text()[8:])
    assert done.returncode == 1
    assert re.search(r"^Timeout \((.|\n)* in hpcllm: some call\n", told, re.MULTILINE), told
    assert silent == ""


KEEPS_THE_GIL = "ctypes.PyDLL(None).usleep(20_000_000)"


def ended_in(call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Make a call in a process of its own, which is to end within seconds."""
    start = time.monotonic()
    script = f"import ctypes; from hpcllm.system import job; {call}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment() | variables, cwd=ROOT, capture_output=True, text=True)
    assert time.monotonic() - start < 10
    return done


@pytest.mark.parametrize(
    ("word", "code", "becomes"),
    [("running", 0, 1), ("running", 9, 9), ("", 0, 0), ("3", 0, 3), ("Timeout!", 0, 1), ("running\nTimeout!", 137, 1)],
)
def test_an_mpirun_that_ends_with_0_before_rank_0_does_has_failed(tmp_path, word, code, becomes):
    """Open MPI's, when it loses a host. Commands that are none of ours write nothing."""
    script = f""". jobscripts/local/launch.sh; hpcllm_abort_file; echo '{word}' >"$HPCLLM_ABORTED"
    hpcllm_exit_code {code}; [ ! -e "$HPCLLM_ABORTED" ]"""
    done = subprocess.run(
        ["bash", "-c", script], env=environment() | {"TMPDIR": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{becomes}\n"), done.stderr
    assert ("a host was lost" in done.stderr) == (word == "running" and code == 0)
    assert ("Timeout!" in done.stderr) == ("Timeout!" in word)


def test_the_launch_script_hears_whether_rank_0_has_come_to_its_end(tmp_path):
    script = "from hpcllm.system.job import run_job; print(run_job(lambda world: print(open(PATH).read()) or 0))"
    path = tmp_path / "aborted"
    path.touch()
    done = subprocess.run(
        [*launcher(2), sys.executable, "-c", script.replace("PATH", repr(str(path)))],
        env=environment() | {"HPCLLM_ABORTED": str(path)}, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert "running" in done.stdout, done.stderr
    assert path.read_text() == ""


@pytest.mark.parametrize(("word", "code"), [("5", 5), ("running\nTimeout (0:00:05)!", 1)])
def test_a_launch_script_ends_what_stays_after_an_abort(tmp_path, word, code):
    """Open MPI's mpirun stays if a host is out of reach; so does this sleep, with a child."""
    script = f"""set -euo pipefail; . jobscripts/local/launch.sh; hpcllm_abort_file
    bash -c 'sleep 60 & wait' & job=$!
    hpcllm_end_after_abort "$job" hpcllm_kill_tree "$job" &
    echo '{word}' >"$HPCLLM_ABORTED"
    wait "$job" && code=0 || code=$?
    hpcllm_exit_code "$code"; pgrep -P "$job" || echo nothing left; [ ! -e "$HPCLLM_ABORTED" ]"""
    environment_ = environment() | {"HPCLLM_ABORT_S": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment_, cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, [f"{code}", "nothing left"]), done.stderr
    assert "ended by force" in done.stderr
