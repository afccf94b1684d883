"""Slurm: which batch job this is, how long it may still run, how it comes into the queue again.

    SLURM_JOB_END_TIME            what newer versions tell a job as it starts
    squeue --format %L            asked again now and then, for a limit can be changed; nobody waits for the answer
    scontrol requeue              the last thing that a run does

For rank 0 alone: a job that asked on every rank would be a load on the controller that sites complain about. Whatever
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
from collections.abc import Mapping
from dataclasses import dataclass, field

START_LIMIT_S = 10.0  # for the first answer, which is waited for
ANSWER_LIMIT_S = 60.0  # for later ones: a controller under load is slow, and nobody waits
END_LIMIT_S = 1.0  # for the words of a program that has ended
REQUEUE_LIMIT_S = 60.0
OVER_S = 60.0  # a job that Slurm ends with less time left than that is at its limit, not cancelled
_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")  # [[days-]hours:]minutes:seconds


class SlurmError(Exception):
    """Slurm did not do what it was asked: not there, too slow, or against its rules. The message says which."""


@dataclass
class BatchJob:
    """The job around this process; its times are those of time.monotonic().

    id: as squeue and scontrol take it: '123', of an array '123_4'.
    """

    id: str
    restarts: int = 0
    end_s: float = math.inf  # inf: no limit, or none that is known
    fault: str = ""  # why the last question had no answer
    _question: subprocess.Popen[str] | None = None
    _asked_s: float = field(default=-math.inf)

    @property
    def name(self) -> str:
        return f"Slurm job {self.id}" + (f", restart {self.restarts}" if self.restarts else "")

    def ask_first(self) -> None:
        """Ask for the time left, and wait for the answer a moment."""
        self._ask()
        if self._question:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._question.wait(START_LIMIT_S)
            self._hear()

    def refresh(self, every_s: float) -> None:
        """Take in an answer that has come, and ask anew if the last question is older than every_s. Never waits."""
        self._hear()
        if not self._question and time.monotonic() - self._asked_s >= every_s:
            self._ask()

    def requeue(self) -> None:
        """Put this very job into the queue again; Slurm ends what is left of it at once. Raises SlurmError."""
        answer = _said(_start("squeue", "--noheader", f"--jobs={self.id}", "--format=%T %L"), START_LIMIT_S).split()
        left_s = time_left_s("\n".join(answer))
        if "COMPLETING" in answer and left_s is not None and left_s > OVER_S:
            raise SlurmError("somebody has cancelled it")  # scontrol would bring it back all the same
        _said(_start("scontrol", "requeue", self.id), REQUEUE_LIMIT_S)

    def _ask(self) -> None:
        self._asked_s = time.monotonic()
        try:
            self._question = _start("squeue", "--noheader", f"--jobs={self.id}", "--format=%L")
        except SlurmError as error:
            self.fault = str(error)

    def _hear(self) -> None:
        if not self._question:
            return
        waited_s = time.monotonic() - self._asked_s
        if self._question.poll() is None and waited_s < ANSWER_LIMIT_S:
            return
        question, self._question = self._question, None
        try:
            left_s = time_left_s(_said(question, END_LIMIT_S if question.poll() is not None else 0.0))
        except SlurmError as error:
            self.fault = str(error)
            return
        self.fault = ""
        if left_s is not None:
            self.end_s = self._asked_s + left_s


def batch_job(environment: Mapping[str, str] = os.environ) -> BatchJob | None:
    """The job that this process is a part of, None outside of Slurm. Of a heterogeneous job: its first component."""
    job = environment.get("SLURM_JOB_ID_HET_GROUP_0") or environment.get("SLURM_JOB_ID")
    if not job:
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    found = BatchJob(f"{array}_{task}" if array and task else job, _whole(environment.get("SLURM_RESTART_COUNT")))
    if end_unix_s := _whole(environment.get("SLURM_JOB_END_TIME")):
        found.end_s = time.monotonic() + end_unix_s - time.time()
    return found


def back_into_queue(obstacle: str) -> str:
    """Requeue the job of this process, unless something keeps it from that. Returns a sentence: what became of it."""
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
    """squeue's '1-02:30:00', '59:59' or 'UNLIMITED' in seconds; the least of several lines, None of none.

    It says INVALID to a job that is past its limit, and NOT_SET to one that has not begun: nothing to go by.
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


def _said(program: subprocess.Popen[str], limit_s: float) -> str:
    """Its standard output, once it has ended, which it has within limit_s. Raises SlurmError."""
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
