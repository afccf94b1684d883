"""Jobs as their launcher sees them: the exit code says finished, failed, or to be continued by the same command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from small_checkpoints import verify
from small_runs import tiny

from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config import schema as configs
from hpcllm.system.job import TO_BE_CONTINUED
from tests.system.test_job import LIMIT_S, ROOT, environment, launcher

ALARMING = ("BAD TERMINATION", "Traceback", "ends the job", "Abort(")


@pytest.fixture
def run_file(tmp_path) -> Path:
    config = tiny(run={"folder": str(tmp_path), "steps": 5}, checkpoint={"every_steps": 0})
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(configs.to_tables(config)))
    return path


def start(run_file: Path, *sets: str, ranks: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpcllm", "train", str(run_file), *(f"--set={key}" for key in sets)]
    return subprocess.Popen(
        [*(launcher(ranks) if ranks else []), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={key: value for key, value in environment().items() if not key.startswith("SLURM_")},
        cwd=ROOT,
    )


@pytest.mark.full(reason="a run in many starts; a quarter of a minute", in_ci=True)
def test_a_run_out_of_time_is_to_be_continued_step_by_step_and_then_finished(run_file):
    late = ("limits.wall_s=0.5", "run.requeue=true", "run.steps=2")
    job = start(run_file, *late)
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == TO_BE_CONTINUED == 75, out
    assert "note: that is less than the margin, so the run will stop after its first step" in out
    stopped = r"1 of 2, stopped by the time limit: it was \d+ s ago, the margin is \d+ s$"
    stopped = r"^steps\s+" + stopped.replace(" ", r"\s+")  # folded at 80 columns
    assert re.search(stopped, out, re.M)
    assert out.endswith("not requeued: this is no Slurm job; the same command goes on\n")
    job = start(run_file, *late)
    out, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, out
    assert "held-out loss" in out


def test_signals_that_come_again_and_again_do_not_break_the_last_checkpoint(run_file):
    job = start(run_file, "run.steps=1000000", "run.name=long", "data.validation_sequences=1", ranks=2)
    folder = run_file.parent / "long"
    try:
        processes = ranks_of(folder, at_step=5, job=job)
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            for process in processes:
                os.kill(process, number)
            time.sleep(0.005)
        out, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == TO_BE_CONTINUED, out
    assert not [word for word in ALARMING if word in out], out
    (path,) = (folder / "checkpoints").iterdir()
    with Checkpoint.open(path) as checkpoint:
        verify(checkpoint)


def ranks_of(folder: Path, at_step: int, job: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, once they have made so many steps."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and job.poll() is None:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True) if (folder / "log.jsonl").exists() else []
        steps = [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("\n")]
        if steps and steps[-1] >= at_step:
            return [int(number) for number in re.findall(r"process (\d+)", (folder / "ranks.txt").read_text())]
        time.sleep(0.05)
    raise AssertionError("no steps were made")
