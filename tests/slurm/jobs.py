"""Runs that live through what happens to batch jobs, in a real Slurm on two made-up nodes. Started by run.sh.

submit ---> srun train ---> cut by (limit | scancel | SIGUSR1 | STOP | kill -9) ---> again, by itself or by hand
                                                                                         |
the same bits as a run that nothing happened to  <--------------------------------------'
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import pytest
from slurm_commands import is_over, slurm, state, until

ROOT = Path(__file__).parents[2]
STEPS = 300
FOR_EVER = 10**6  # steps: of a run that only the test ends
LIMIT_S = 100.0


@dataclass(frozen=True)
class Cluster:
    folder: Path
    reference: dict[str, bytes] = field(default_factory=dict)

    def job(self, run: str, minutes: int, requeue: bool = False, **keys: object) -> Job:
        """Submit a run of the run file with some other keys."""
        sets = {"run.name": run, "run.requeue": str(requeue).lower()} | {
            key.replace("__", "."): value for key, value in keys.items()
        }
        words = " ".join(f"--set {key}={value}" for key, value in sets.items())
        script = self.folder / f"{run}.sh"
        script.write_text(SCRIPT.format(minutes=minutes, python=sys.executable, sets=words, here=self.folder))
        out = self.folder / f"{run}.out"
        out.unlink(missing_ok=True)
        return Job(self, slurm("sbatch", "--parsable", f"--output={out}", str(script)), run, out)


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time={minutes} --requeue --open-mode=append
export OMP_NUM_THREADS=1
echo "start ${{SLURM_RESTART_COUNT:-0}}"
srun "{python}" -m hpcllm train "{here}/run.toml" {sets}
echo "exit code $?"
"""
RUN_FILE = """
[run]
folder = "{here}/runs"
steps = {steps}
[model]
layers = 2
hidden = 32
heads = 4
ffn = 48
[data]
store = "{here}/store.h5"
sequence_length = 32
global_batch = 8
validation_sequences = 8
[communication]
gradients = "int8:128"
exact_steps = 3
[checkpoint]
every_steps = 100
[log]
every_steps = 1
trackers = []
"""


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    id: str
    run: str
    out: Path

    @property
    def state(self) -> str:
        return state(self.id)

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def steps(self) -> list[int]:
        path = self.folder / "log.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [record["step"] for record in records if "loss" in record]

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def folder(self) -> Path:
        return self.cluster.folder / "runs" / self.run

    def until(self, what: Callable[[Job], bool]) -> Job:
        until(lambda: what(self), LIMIT_S, lambda: f"{self.state}: {self.text}")
        return self

    def works(self, more_than: Job | None = None, steps: int = 10) -> Job:
        """Wait until it has made some steps, more than one that has ended."""
        first = more_than.last_step if more_than else 0
        return self.until(lambda job: job.last_step >= first + steps)

    def ended(self) -> Job:
        return self.until(lambda job: is_over(job.id))

    def finished(self) -> Job:
        self.ended()
        assert self.state == "COMPLETED", self.text
        assert self.text.endswith("exit code 0\n"), self.text
        return self

    def stopped(self, by: str) -> Job:
        """Ended with the exit code that says so, and with words that do."""
        self.ended()
        assert self.text.endswith("exit code 75\n"), self.text
        assert re.search(rf"stopped by {by}", self.text), self.text
        assert "Traceback" not in self.text
        return self

    def bits(self) -> dict[str, bytes]:
        """Every tensor of the last checkpoint."""
        found = {}

        def collect(name: str, node: object) -> None:
            if isinstance(node, h5py.Dataset) and name.startswith(("model/", "optimizer/")):
                found[name] = node[()].tobytes()

        with h5py.File(self.folder / "checkpoints" / f"step_{STEPS:08}.h5") as file:
            file.visititems(collect)
        assert len(found) > 10
        return found


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """That of run.sh, which also ends it."""
    folder = Path(os.environ["HPCLLM_SLURM"])
    (folder / "run.toml").write_text(RUN_FILE.format(here=folder, steps=STEPS))
    prepare = [sys.executable, "-m", "hpcllm", "prepare", ROOT / "hpcllm" / "pipeline", "--output", folder / "store.h5"]
    subprocess.run([*prepare, "--vocabulary", "300", "--validation-fraction", "0.2"], check=True, timeout=LIMIT_S)
    return Cluster(folder)


def undisturbed(cluster: Cluster) -> dict[str, bytes]:
    """The bits of a run that nothing happens to, which one job makes for all tests."""
    if not cluster.reference:
        cluster.reference.update(cluster.job("undisturbed", minutes=30).finished().bits())
    return cluster.reference


def test_a_job_cut_by_its_time_limit_requeues_itself_and_ends_with_the_same_bits(cluster):
    job = cluster.job("cut", minutes=1, requeue=True, limits__margin_s=58)  # one step is made in any case
    job.until(lambda job: job.state == "PENDING" and "in the queue again" in job.text)
    assert re.search(r"stopped by the time limit: .*, the margin is 58 s", job.text), job.text
    assert 1 <= job.steps[-1] < STEPS
    slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=30")
    want = undisturbed(cluster)  # the other waits for some seconds anyway
    job.finished()
    assert "start 1\n" in job.text
    assert f"Slurm job {job.id}, restart 1: " in job.text
    assert job.steps == list(range(1, STEPS + 1))
    assert job.bits() == want


def goes_on(job: Job) -> str:
    """What the last start said of where it goes on."""
    found = re.findall(r"^goes on from .*\n", job.text, re.MULTILINE)
    return found[-1] if found else ""


def test_a_run_that_is_stopped_in_every_way_ends_with_the_same_bits(cluster):
    """One run, a job after the other."""
    cancelled = cluster.job("stopped", minutes=30, requeue=True).works()
    slurm("scancel", cancelled.id)
    cancelled.ended()
    assert "stopped by SIGTERM" in cancelled.text
    assert "not requeued: somebody has cancelled it" in cancelled.text

    signalled = cluster.job("stopped", minutes=30).works(more_than=cancelled)
    slurm("scancel", "--signal=USR1", signalled.id)
    signalled.stopped(by="SIGUSR1")

    stopped = cluster.job("stopped", minutes=30, requeue=True).works(more_than=signalled)
    (stopped.folder / "STOP").touch()
    stopped.stopped(by="a file STOP")
    assert "not requeued: somebody asked it to stop" in stopped.text
    assert not (stopped.folder / "STOP").exists()
    stopped_at = stopped.last_step

    killed = cluster.job("stopped", minutes=30, checkpoint__every_steps=20).works(more_than=stopped, steps=60)
    for process in re.findall(r"process (\d+)", (killed.folder / "ranks.txt").read_text()):
        os.kill(int(process), signal.SIGKILL)
    killed.ended()
    killed_at = killed.last_step
    assert killed.text.endswith("exit code 137\n"), killed.text

    job = cluster.job("stopped", minutes=30).finished()
    step = int(re.search(r"step_(\d+)", goes_on(job))[1])
    assert stopped_at < step <= killed_at
    assert job.steps == list(range(1, STEPS + 1))
    assert job.bits() == undisturbed(cluster)
    assert cancelled.state == "CANCELLED"  # all the time


def test_a_limit_that_is_changed_is_noticed(cluster):
    job = cluster.job("changed", minutes=10, run__steps=FOR_EVER, limits__margin_s=300, log__every_steps=10).works()
    assert re.search(r"Slurm job \d+: 5\d\d s left; the run will stop by itself 300 s before", job.text)
    slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    job.stopped(by=r"the time limit: .*, the margin is 300 s")


def test_the_hosts_file_of_the_machine_is_as_it_was(cluster):
    names = Path("/etc/hosts").read_text()
    assert (cluster.folder / "slurm" / "hosts").read_text() == f"{names}127.0.0.1 n1 n2\n"
