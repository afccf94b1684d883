"""A check of a lab inside a job of a real Slurm: ranks by srun on the job's node, and none left. Started by run.sh.

sbatch, 2 nodes ---> hpcllm course check on the first ---> srun, 4 ranks there      right file: all points of the laws
salloc ------------> hpcllm course check on no node -----> srun, 4 ranks on one     waits, ignores signals: a hint
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_commands import environment, is_over, slurm, until

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "course/latency/right/plain.py").read_text(encoding="utf-8")
LIMIT_S = 150.0
IGNORES = "import signal\nfor number in (1, 2, 15):\n    signal.signal(number, signal.SIG_IGN)\n"
ENDLESS = f"{RIGHT}\n{IGNORES}\n\ndef one_way(comm, size_bytes, rounds):\n    while True: pass\n"
RECEIVES = "if comm.size == 1: return 0.0\n    comm.Recv(bytearray(1), source=0)"
CIRCLE = f"{RIGHT}\n{IGNORES}\n\ndef one_way(comm, size_bytes, rounds):\n    {RECEIVES}\n"


def ranks_left(folder: Path) -> list[str]:
    """Command lines of processes that were started in a job of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"COURSE_MARK={folder}\0".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def checked(folder: Path, text: str, submit: list[str]) -> dict[str, Any]:
    """Check a file in a job; return its grade, and whether the job has left ranks."""
    (folder / "latency.py").write_text(text, encoding="utf-8")
    (folder / "job.sh").write_text(
        f'#!/bin/bash\nexport COURSE_MARK="{folder}" TMPDIR=/tmp OMP_NUM_THREADS=1\n'
        f'"{sys.executable}" -m hpcllm.course check --folder "{folder}" --json "{folder}/grade.json"\necho "code $?"\n'
    )
    (folder / "job.sh").chmod(0o755)
    job = slurm(*submit, str(folder / "job.sh"), cwd=folder, env=environment(PYTHONPATH=str(ROOT)))
    if submit is SBATCH:
        until(lambda: is_over(job), LIMIT_S)
    grade: dict[str, Any] = json.loads((folder / "grade.json").read_text())
    until(lambda: not ranks_left(folder), 20, lambda: f"left: {ranks_left(folder)}")
    assert not list(folder.glob("hpcllm-course*"))
    return grade


SBATCH = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=5", "--output=out"]
SALLOC = ["salloc", "--nodes=1", "--time=5"]


@pytest.mark.parametrize("submit", [SBATCH, SALLOC], ids=["sbatch", "salloc"])
def test_a_right_file_gets_its_points_in_a_job(submit, tmp_path):
    grade = checked(tmp_path, RIGHT, submit)
    assert grade["laws_hold"], grade
    assert all(part["rows"] for part in grade["parts"] if part["stage"] == "races")


@pytest.mark.parametrize(("text", "hint"), [(ENDLESS, "endless"), (CIRCLE, "deadlock")], ids=["endless", "deadlock"])
def test_a_file_that_hangs_and_ignores_signals_ends_in_its_hint_and_leaves_no_rank(text, hint, tmp_path):
    grade = checked(tmp_path, text, SBATCH)
    assert next(part["hint_key"] for part in grade["parts"] if part["hint_key"]) == hint, grade
