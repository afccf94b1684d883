"""Jobs end together: a mistake of all is said once, a failure of one ends the others within seconds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_jobs import environment

from hpcllm.system import job as job_module
from hpcllm.system.job import StopSignals, run_job

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0  # of a job that ought to take about one second
PREAMBLE = """
import sys, time
from mpi4py import MPI
from hpcllm.errors import *
from hpcllm.system.job import run_job
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed

def fail(error):
    raise error
"""


def launcher(ranks: int) -> list[str]:
    """mpirun of the environment that runs the tests, else the first on the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun on this machine")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    spread = ["--map-by", ":OVERSUBSCRIBE"] if "Open MPI" in version or "prte" in version.lower() else []
    return [mpirun, *spread, "-n", str(ranks)]


def run_script(script: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Python on some ranks, without standard input."""
    return subprocess.run(
        [*launcher(ranks), sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def job(command: str, ranks: int = 2) -> tuple[int, str, str, float]:
    """Exit code, standard output, standard error, seconds of `run_job(lambda world: command)` on some ranks."""
    script = f"{PREAMBLE}\ndef command(world):\n    {command}\n    return 0\n\nsys.exit(run_job(command))\n"
    start = time.monotonic()
    done = run_script(script, ranks)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


def test_a_job_that_does_its_work_ends_with_zero_and_says_nothing_of_its_own():
    # one write each: the launcher puts whole writes together
    code, out, err, _ = job("print(f'rank {world.rank} of {world.size}\\n', end='')")
    assert (code, sorted(out.split("\n"))) == (0, ["", "rank 0 of 2", "rank 1 of 2"])
    assert "hpcllm" not in err


@pytest.mark.parametrize(
    "command",
    [
        "fail(MeshError('dp = 3'))",
        "on_root(world, lambda: fail(MeshError('dp = 3')))",
        "time.sleep(0.3 * world.rank); fail(MeshError('dp = 3'))",
    ],
    ids=["each rank", "the root", "one later than the other"],
)
def test_a_user_error_of_all_ranks_is_said_once_with_exit_code_2(command):
    code, _, err, _ = job(command)
    assert code == 2
    assert err.count("hpcllm: error: dp = 3\n") == 1
    assert "Traceback" not in err
    assert "ends the job" not in err


def test_a_failure_that_all_ranks_know_of_is_said_once_with_exit_code_1():
    code, _, err, _ = job("raise_if_any_failed(world, OSError('disk is full') if world.rank == 1 else None)")
    assert code == 1
    assert err.count("hpcllm: error: 1 of 2 ranks failed: rank 1: OSError: disk is full") == 1
    assert "ends the job" not in err


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("fail(RuntimeError('a bug'))", "RuntimeError: a bug"),
        ("fail(StallError('waited 3 s'))", "StallError: waited 3 s"),
        ("fail(DataError('not here'))", "DataError: not here"),
        ("sys.exit('enough')", "SystemExit: enough"),
    ],
)
@pytest.mark.parametrize("others", ["world.Barrier()", "time.sleep(300)"])
def test_a_rank_that_fails_alone_ends_the_job_and_says_who_it_is(failure, said, others):
    code, _, err, seconds = job(f"{failure} if world.rank == 1 else {others}")
    assert code not in (0, None)
    assert "hpcllm: rank 1 of 2 on " in err
    assert said in err
    assert "hpcllm: rank 0" not in err
    assert seconds < 30


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGBUS"])
def test_a_rank_that_crashes_says_who_it_is_in_its_stack(number):
    start = "import os, signal; from hpcllm.system import diagnostics; diagnostics.start()"
    crash = f"os.kill(os.getpid(), signal.{number}) if world.rank == 1 else time.sleep(300)"
    code, _, err, seconds = job(f"{start}; {crash}")
    assert code not in (0, None)
    assert "in hpcllm: rank 1 of 2 on " in err
    assert "in hpcllm: rank 0" not in err
    assert seconds < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_first_signal_sets_a_flag_and_what_was_there_before_comes_back(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received == ""
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    assert signal.getsignal(number) is before


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # the handler runs at the next bytecode; never slept to the end


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_heard_twice(monkeypatch):
    with StopSignals() as signals:
        for _ in range(3):  # from the terminal, and passed on by the launcher
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        monkeypatch.setattr(job_module, "INSIST_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_a_signal_repeated_while_a_job_shuts_down_does_not_make_it_fail():
    stops = "with StopSignals() as signals:\n    signals.keep_out()\n"
    repeats = "for number in (signal.SIGTERM, signal.SIGUSR1):\n    os.kill(os.getpid(), number)\n"
    script = f"import os, signal\nfrom hpcllm.system.job import StopSignals\n{stops}{repeats}"
    assert subprocess.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, timeout=LIMIT_S).returncode == 0


def test_a_job_whose_output_nobody_reads_ends_at_once_and_says_so():
    close = "import os; ends = os.pipe(); os.dup2(ends[1], 1); os.close(ends[0])"
    code, _, err, seconds = job(f"{close}; print('x', flush=True) if world.rank == 1 else time.sleep(300)")
    assert code not in (0, None)
    assert "hpcllm: rank 1 of 2 on " in err
    assert "nobody reads its standard output" in err
    assert "hpcllm: rank 0" not in err
    assert seconds < 30


def test_signals_of_the_scheduler_may_come_again():
    with StopSignals() as signals:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.received == "SIGTERM"


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_command_is_that_of_the_job(code):
    assert run_job(lambda world: code * world.size) == code
