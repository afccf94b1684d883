"""Slurm: which batch job this is, how long it may still run, how it is requeued, how nodes are named.

    SLURM_JOB_END_TIME            what newer versions tell a job as it starts
    squeue --format %L            read again now and then, as a limit can be changed; nobody waits for the answer
    scontrol requeue              the last thing that a run does

For rank 0 alone: queries of every rank would be a load on the controller that sites complain about. Whatever
fails here is no reason for a run to fail. Programs are started by vfork, as subprocess does it, so the memory that MPI
has registered with the network is never copied.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpcllm.system.hardware.sysfs import runs

START_LIMIT_S = 10.0  # for the first answer, which is waited for
ANSWER_LIMIT_S = 60.0  # for later ones: a controller under load is slow, and nobody waits
END_LIMIT_S = 1.0  # for the words of a program that has ended
REQUEUE_LIMIT_S = 60.0
OVER_S = 60.0  # a job that Slurm ends with less time left than that is at its limit, not cancelled
_NODE = re.compile(r"^(.*?)([0-9]*)$", re.DOTALL)  # stem, number
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")  # [[days-]hours:]minutes:seconds


class SlurmError(Exception):
    """Slurm did not do what was requested: not there, too slow, or against its rules. The message says which."""


@dataclass
class BatchJob:
    """Batch job of this process; its times are those of time.monotonic().

    id: as squeue and scontrol take it: '123', of an array '123_4'.
    """

    id: str
    restarts: int = 0
    end_s: float = math.inf  # inf: no limit, or none that is known
    fault: str = ""  # why the last query had no answer
    _query: subprocess.Popen[str] | None = None
    _queried_s: float = field(default=-math.inf)

    @property
    def name(self) -> str:
        return f"Slurm job {self.id}" + (f", restart {self.restarts}" if self.restarts else "")

    def ask_first(self) -> None:
        """Query the time left, and wait up to START_LIMIT_S for the answer."""
        self._ask()
        if self._query:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._query.wait(START_LIMIT_S)
            self._read_answer()

    def refresh(self, every_s: float) -> None:
        """Read an answer that has come, and ask again if the last query is older than every_s. Never waits."""
        self._read_answer()
        if not self._query and time.monotonic() - self._queried_s >= every_s:
            self._ask()

    def requeue(self) -> None:
        """Requeue this job; Slurm ends what is left of it at once. Raises SlurmError."""
        answer = _output(_start("squeue", "--noheader", f"--jobs={self.id}", "--format=%T %L"), START_LIMIT_S).split()
        left_s = time_left_s("\n".join(answer))
        if "COMPLETING" in answer and left_s is not None and left_s > OVER_S:
            raise SlurmError("somebody has cancelled it")  # scontrol would bring it back all the same
        _output(_start("scontrol", "requeue", self.id), REQUEUE_LIMIT_S)

    def _ask(self) -> None:
        self._queried_s = time.monotonic()
        try:
            self._query = _start("squeue", "--noheader", f"--jobs={self.id}", "--format=%L")
        except SlurmError as error:
            self.fault = str(error)

    def _read_answer(self) -> None:
        if not self._query:
            return
        waited_s = time.monotonic() - self._queried_s
        if self._query.poll() is None and waited_s < ANSWER_LIMIT_S:
            return
        query, self._query = self._query, None
        try:
            left_s = time_left_s(_output(query, END_LIMIT_S if query.poll() is not None else 0.0))
        except SlurmError as error:
            self.fault = str(error)
            return
        self.fault = ""
        if left_s is not None:
            self.end_s = self._queried_s + left_s


def batch_job(environment: Mapping[str, str] = os.environ) -> BatchJob | None:
    """Return the job of this process, None outside of Slurm; of a heterogeneous job its first component."""
    job = environment.get("SLURM_JOB_ID_HET_GROUP_0") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    found = BatchJob(f"{array}_{task}" if array and task else job, _whole(environment.get("SLURM_RESTART_COUNT")))
    if end_unix_s := _whole(environment.get("SLURM_JOB_END_TIME")):
        found.end_s = time.monotonic() + end_unix_s - time.time()
    return found


def requeue_job(obstacle: str) -> str:
    """Requeue the job of this process unless there is an obstacle. Returns a sentence with the result."""
    job = batch_job()
    if obstacle:
        return f"not requeued: {obstacle}; the same command goes on"
    if not job:
        return "not requeued: this is no Slurm job; the same command goes on"
    try:
        job.requeue()
    except SlurmError as error:
        return f"job {job.id} is not requeued: {error}; the same command goes on"
    return f"job {job.id} is in the queue again; its next start goes on"


def time_left_s(answer: str) -> float | None:
    """Parse squeue's '1-02:30:00', '59:59' or 'UNLIMITED' as seconds; the least of several lines, None of none.

    squeue says INVALID of a job that is past its limit and NOT_SET of one that has not begun: None, too.
    """
    lines = [line.strip() for line in answer.splitlines()]
    found = [math.inf for line in lines if line == "UNLIMITED"]
    for match in filter(None, map(_LEFT.fullmatch, lines)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        found.append(((days * 24 + hours) * 60 + minutes) * 60.0 + seconds)
    return min(found, default=None)


def _start(*command: str) -> subprocess.Popen[str]:
    # a user's SQUEUE_PARTITION, SQUEUE_STATES, ... would filter this very job out
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error.strerror}") from error


def _output(program: subprocess.Popen[str], limit_s: float) -> str:
    """Wait up to limit_s for the program to end and return its standard output. Raises SlurmError."""
    name = program.args[0] if isinstance(program.args, tuple) else ""
    with program:
        try:
            out, err = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            program.kill()
            raise SlurmError(f"{name} gave no answer in time") from error
    if program.returncode:
        raise SlurmError(f"{name}: {err.strip() or f'exit code {program.returncode}'}")
    return out


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def nodes_text(names: Iterable[str], most: int | None = None) -> str:
    """Return 'n[1-3,7]', names of nodes as --exclude and --nodelist take them; of more than `most`: 'n[1-3], ...'."""
    ordered = list(dict.fromkeys(names))
    shown = ordered if most is None else ordered[:most]
    parts = [_stem_and_number(name) for name in shown]
    padded = {(stem, len(digits)) for stem, digits in parts if len(digits) > 1 and digits.startswith("0")}
    groups: dict[tuple[str, int], list[int]] = {}
    for stem, digits in parts:  # 7 and 07 are different nodes
        width = len(digits) if (stem, len(digits)) in padded else 0 if digits else -1
        groups.setdefault((stem, width), []).append(int(digits) if digits else -1)
    text = ",".join(_group(stem, width, found) for (stem, width), found in groups.items())
    return text if len(shown) == len(ordered) else f"{text}, ... ({len(ordered)} nodes)"


def _stem_and_number(name: str) -> tuple[str, str]:
    match = _NODE.match(name)
    return (match[1], match[2]) if match else (name, "")


def _group(stem: str, width: int, found: list[int]) -> str:
    if width < 0:  # no number at all
        return stem
    parts = [f"{a:0{width}}-{b:0{width}}" if b > a else f"{a:0{width}}" for a, b in runs(found)]
    return f"{stem}{parts[0]}" if len(parts) == 1 and "-" not in parts[0] else f"{stem}[{','.join(parts)}]"
