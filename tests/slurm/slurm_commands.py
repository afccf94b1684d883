"""Commands of Slurm on the made-up nodes of fakeslurm.sh, from outside of any job.

    slurm("sbatch", "--parsable", script) -> job        until(lambda: is_over(job), limit_s)

`sbatch --wait` would look at ever longer intervals, up to half a minute.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LIMIT_S = 150.0
OF_A_JOB = ("SLURM", "PMI_", "PMIX_", "OMPI_")
NOT_OVER = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def environment(without: tuple[str, ...] = (), **variables: str) -> dict[str, str]:
    """Variables of a user who is in no job; but for those whose names begin as in `without`, and with others."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB + without)}
    return {**kept, "SLURM_CONF": str(Path(os.environ["HPCLLM_SLURM"]) / "slurm" / "slurm.conf"), **variables}


def slurm(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return what a command of Slurm prints. Raises AssertionError if it fails."""
    env = environment() if env is None else env
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout.strip()


def state(job: str) -> str:
    """Return "PENDING", "RUNNING", "COMPLETED", ..., of a job that has ended, too."""
    return slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")


def is_over(job: str) -> bool:
    return state(job) not in NOT_OVER


def until(what: Callable[[], bool], limit_s: float, why: Callable[[], str] = str) -> None:
    """Wait until it is so. Raises AssertionError, with what `why` says, after limit_s."""
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, why()
        time.sleep(0.1)
