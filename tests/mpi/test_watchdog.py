"""Jobs in which a rank is stopped or killed end by themselves, soon, and say once who it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from hpcllm.mpi import watchdog
from tests.system.test_job import ROOT, environment, launcher, run_script

LIMIT_S = 60.0  # of a job that ought to take about ten seconds
STALL_S, GRACE_S, DEPUTY_S = 1.5, 0.6, 0.6  # of the letters below
LETTERS = f"""
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from hpcllm.mpi import watchdog
from hpcllm.system.job import run_job
from hpcllm.mpi.wait import Waits

watchdog.GRACE_S, watchdog.DEPUTY_S = {GRACE_S}, {DEPUTY_S}
STOPPED = set(map(int, sys.argv[1].split()))

def letters(world, comm, waits):
    "Each rank gets a letter from the one before it and sends one to the next, round and round."
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for number in range(10**6):
        if number == 20 and world.rank in STOPPED:
            print("STOPPED", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        got = np.empty(1)
        requests = [comm.Irecv(got, left), comm.Isend(np.ones(1), right)]
        waits.all(requests, lambda: f"letter {{number}} from stage {{left}} (rank {{left}})")

def from_a_thread(*arguments):
    failures = []
    def work():
        try:
            letters(*arguments)
        except BaseException as failure:
            failures.append(failure)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise failures[0]

def command(world):
    with watchdog.open_watchdog(world, lambda rank: f"stage {{rank}}") as ours:
        limit_s = {STALL_S} if world.rank == world.size - 1 else 300.0  # the others are asked
        globals()[sys.argv[2]](world, world.Dup(), Waits(limit_s, observer=ours))
    return 0

sys.exit(run_job(command))
"""


def end_of_letters(stopped: str, ranks: int, writer: str = "letters") -> tuple[int, str, float]:
    """Exit code, standard error and seconds since the stop of a job in which some ranks stop at letter 20."""
    done = run_script(LETTERS, ranks, stopped, writer)
    stopped_at = max(map(float, re.findall(r"\d{9,}\.\d+", done.stdout)))  # two ranks' lines may come mixed
    return done.returncode, done.stderr, time.time() - stopped_at


@pytest.mark.parametrize("writer", ["letters", "from_a_thread"])
def test_a_stopped_rank_is_named_once_by_rank_0(writer):
    code, err, seconds = end_of_letters("2", 5, writer)
    assert code not in (0, None)
    assert err.count("ends the job") == 1
    assert "hpcllm: rank 0 of 5" in err
    assert re.search(r"rank 2 \(stage 2, process \d+ on .*\) has not answered; 4 ranks wait for it, directly or", err)
    assert seconds < STALL_S + GRACE_S + 2


def test_where_rank_0_is_stopped_rank_1_says_so():
    code, err, seconds = end_of_letters("0", 3)
    assert code not in (0, None)
    assert err.count("ends the job") == 1
    assert "hpcllm: rank 1 of 3" in err
    assert re.search(r"rank 0 \(stage 0, process .*\) has not answered; 2 ranks wait for it", err)
    assert seconds < STALL_S + GRACE_S + DEPUTY_S + 2


def test_where_both_are_stopped_the_others_speak_for_themselves():
    code, err, seconds = end_of_letters("0 1", 3)
    assert code not in (0, None)
    assert "hpcllm: rank 2 of 3" in err
    assert re.search(r"waited 1.5 s for letter 2\d from stage 1 \(rank 1\)", err)
    assert seconds < STALL_S + GRACE_S + 2 * DEPUTY_S + 2


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a token store; its name has a space, as users' folders do."""
    with tempfile.TemporaryDirectory(prefix="hpcllm test ") as name:
        for number in range(40):
            text = " ".join(str(number * i % 977) for i in range(300))
            (Path(name) / f"{number}.txt").write_text(f"document {number}: {text}")
        prepare = ["prepare", name, "--output", f"{name}/store.h5", "--vocabulary", "300"]
        subprocess.run(
            [sys.executable, "-m", "hpcllm", *prepare],
            check=True,
            env=environment(),
            timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
        )
        yield Path(name)


RUN = """
run = {{name = "{name}", folder = "{folder}", steps = 1000000}}
model = {{layers = 4, hidden = 32, heads = 4, ffn = 48, tied = false}}
data = {{store = "{folder}/store.h5", sequence_length = 32, global_batch = 8}}
mesh = {{pp = {pp}}}
pipeline = {{microbatches = 4}}
communication = {{algorithm = "ring"}}
checkpoint = {{every_steps = 0}}
log = {{every_steps = 1, trackers = []}}
limits = {{stall_s = {limit_s}}}
"""
TRAINING_STALL_S = 5
BEGINS_TO_TRAIN = pytest.mark.full(reason="four ranks begin to train, a fifth of a minute")


def end_of_training(
    folder: Path, pp: int, victim: int, number: signal.Signals, flags: tuple[str, ...] = ()
) -> tuple[int, str, float, str]:
    """Exit code, all output, seconds since the signal, and the victim's line in ranks.txt, of a run on 4 ranks.

    flags: of the launcher.
    """
    name = f"{pp} {victim} {number.name}"
    (folder / "run.toml").write_text(RUN.format(folder=folder, name=name, pp=pp, limit_s=TRAINING_STALL_S))
    start_job, *ranks = launcher(4)
    command = [start_job, *flags, *ranks, sys.executable, "-m", "hpcllm", "train", str(folder / "run.toml")]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, **quiet) as job:
        try:
            began = next((text for text in job.stdout if re.match(r"step +3/", text)), None)
            assert began, "the job ended before it was stopped"
            line = (folder / name / "ranks.txt").read_text().splitlines()[victim]
            os.kill(int(re.search(r"process (\d+) on", line)[1]), number)
            start = time.monotonic()
            output = job.communicate(timeout=LIMIT_S)[0]
        finally:
            job.kill()
    return job.returncode, output, time.monotonic() - start, line


@BEGINS_TO_TRAIN
@pytest.mark.alone
@pytest.mark.parametrize(("pp", "victim"), [(4, 2), (2, 3)], ids=["1 x 4 stages", "2 x 2 stages"])
def test_a_rank_that_stops_in_training_is_named_within_the_limit(folder, pp, victim):
    code, output, seconds, line = end_of_training(folder, pp, victim, signal.SIGSTOP)
    assert code not in (0, None)
    assert output.count("ends the job") == 1
    where = line.partition(": ")[2]
    assert f"rank {victim} ({where}) has not answered; 3 ranks wait for it" in output
    assert seconds < TRAINING_STALL_S + watchdog.GRACE_S + 2


@BEGINS_TO_TRAIN
@pytest.mark.alone
def test_a_rank_that_is_killed_in_training_is_named_by_us_or_by_the_launcher(folder):
    """MPICH's launcher is asked to leave the other ranks alone; where it ends them at once, it has to say why."""
    flags = ("-disable-auto-cleanup",) if MPI.get_vendor()[0] == "MPICH" else ()
    code, output, seconds, _ = end_of_training(folder, 4, 2, signal.SIGKILL, flags)
    assert code not in (0, None)
    ended_at_once = bool(flags) and seconds < TRAINING_STALL_S
    assert re.search(r"rank 2\b|\(signal 9\)" if ended_at_once else r"rank 2\b", output, re.IGNORECASE)
    assert seconds < TRAINING_STALL_S + watchdog.GRACE_S + 2
