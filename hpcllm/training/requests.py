"""Requests to save or to stop, from people, the batch system or the clock: all ranks learn of them after one step.

    any rank   SIGTERM, SIGUSR1, Ctrl-C ---------------+
    rank 0     a file STOP or SAVE in the run folder --+--> one number each in the sum that ends a step --> Requests
               the time limit is near -----------------+         (loss and traffic travel in the same sum)

After a SAVE the run goes on, and the file is removed when the checkpoint is on disk. Every other request ends the run
with a checkpoint and the exit code "to be continued"; a file STOP is removed then. A STOP that is there before the
first step counts too, and no step is made.

A run stops by itself so that its last checkpoint is on disk before the time is over:

    now          stop after this step: left < margin                    limit
     |--- step ---|- - - - - - - - - - - - - - - margin - - - - - - - - -|
                     one more step, a validation, a write that is under way, the last write, the end of the job

The limit is the batch job's, or limits.wall_s from the start of the process, whichever comes first. The margin is
limits.margin_s, or made of the longest time that each of these has taken in this start. Rank 0 decides for all.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcllm import STARTED_S
from hpcllm.checkpoint.folder import step_of
from hpcllm.config.schema import Config
from hpcllm.model.shapes import parameter_count
from hpcllm.system.job import StopSignals
from hpcllm.system.slurm import BatchJob, batch_job
from hpcllm.training.log import Log

LOOK_EVERY_S = 1.0  # for files, on rank 0
STOP, SAVE, TIME = "STOP", "SAVE", "TIME"
# the first one that was requested is the reason given; people first
REASONS = (STOP, "SIGINT", "SIGTERM", "SIGUSR1", TIME)
COUNTED = (*REASONS, SAVE, "left_s", "margin_s")  # numbers in the sum; the last two from rank 0 with TIME
REQUEUED = (TIME, "SIGTERM", "SIGUSR1")  # sent by the batch system, not by a person who wants the run to end

BYTES_A_PARAMETER = 16  # in a checkpoint: fp32 master and moments, and weights; error feedback is not counted
GUESSED_BYTES_S = 0.5e9  # for the first write: the rate of one slow disk
WRITES, STEPS = 2, 2  # one write under way as the last begins; the step that is cut off by the limit, and doubt
LEAVING_S = 10.0  # from the last write to the end of the job: MPI, the launcher, the batch script
FAR_S, NEAR_S = 300.0, 15.0  # between questions to the batch system, and near the end
NEAR_MARGINS = 2.0

RequestCounts = NDArray[np.float64]  # (len(COUNTED),)
NO_REQUESTS: RequestCounts = np.zeros(len(COUNTED))


@dataclass(frozen=True)
class Requests:
    """Requests that all ranks have agreed on after a step, equal everywhere."""

    save: bool = False
    reason: str = ""  # one of REASONS if the run is to stop
    why: str = ""  # the reason in words

    @property
    def stop(self) -> bool:
        return bool(self.reason)

    @classmethod
    def from_sums(cls, sums: RequestCounts) -> Requests:
        """Read the sum over all ranks of what `RequestListener.poll` returns."""
        counts = dict(zip(COUNTED, sums.tolist(), strict=True))
        reason = next((name for name in REASONS if counts[name]), "")
        left_s = counts["left_s"]
        left = f"{left_s:.0f} s were left" if left_s >= 0 else f"it was {-left_s:.0f} s ago"
        words = {
            STOP: "a file STOP in the run folder",
            TIME: f"the time limit: {left}, the margin is {counts['margin_s']:.0f} s",
        }
        return cls(bool(counts[SAVE]), reason, words.get(reason, reason))

    def why_not_requeued(self, steps_made: int) -> str:
        """Return why a run that stopped for this reason does not go back into the queue, '' if it may."""
        if self.reason not in REQUEUED:
            return f"somebody asked it to stop, by {self.why}"
        if not steps_made:
            return "this start made no step, and the next would make none either"
        return ""


@dataclass
class Margin:
    """Seconds before the limit at which a run stops."""

    fixed_s: float  # 0: made of what is measured
    state_bytes: float  # size of a checkpoint, about; used until a write is measured
    validation_batches: float = 0.0  # steps with as many samples as a validation; used until one is measured
    write_s: float = 0.0
    validation_s: float = 0.0
    _steps: list[float] = field(default_factory=list)  # the first, and the longest of the others

    @property
    def seconds(self) -> float:
        if self.fixed_s:
            return self.fixed_s
        write_s = self.write_s or self.state_bytes / GUESSED_BYTES_S
        validation_s = self.validation_s or self.validation_batches * self.step_s
        return WRITES * write_s + STEPS * self.step_s + validation_s + LEAVING_S

    @property
    def step_s(self) -> float:
        """Longest step; the first one also compiles and allocates, and counts only while there is no other."""
        return self._steps[-1] if self._steps else 0.0

    def step(self, seconds: float) -> None:
        self._steps = [*self._steps[:1], max(seconds, *self._steps[1:], 0.0)]

    def write(self, seconds: float) -> None:
        self.write_s = max(self.write_s, seconds)

    def validation(self, seconds: float) -> None:
        self.validation_s = max(self.validation_s, seconds)


@dataclass
class Deadline:
    """Time limit of a run, for rank 0. wall_s: from the start of the process, 0: no limit but the batch job's."""

    wall_s: float
    margin: Margin
    job: BatchJob | None

    @property
    def left_s(self) -> float:
        """Seconds until the limit; inf if there is none."""
        ends_s = [STARTED_S + self.wall_s] if self.wall_s else []
        return min([*ends_s, self.job.end_s if self.job else math.inf]) - time.monotonic()

    def is_near(self) -> bool:
        """Return true if it is time to stop. Asks the batch system now and then if it has changed the limit."""
        if self.job:
            is_soon = self.left_s < NEAR_MARGINS * self.margin.seconds + FAR_S
            self.job.refresh(NEAR_S if is_soon else FAR_S)
        return self.left_s < self.margin.seconds

    def lines(self) -> list[str]:
        """Return what a run prints about its time limit as it starts."""
        name = self.job.name if self.job else "limits.wall_s"
        if math.isfinite(self.left_s):
            lines = [f"{name}: {self.left_s:.0f} s left; the run will stop by itself {self._margin_words()}"]
        elif self.job and self.job.fault:
            lines = [f"{name}: its time limit is not known ({self.job.fault}); limits.wall_s can set one"]
        else:
            lines = [f"{name}: no time limit"] if self.job else []
        if self.left_s < self.margin.seconds:
            lines.append("note: that is less than the margin, so the run will stop after its first step")
        return lines

    def _margin_words(self) -> str:
        if self.margin.fixed_s:
            return f"{self.margin.fixed_s:g} s before that"
        return (
            f"in time to save, by what steps and writes take (a margin of {self.margin.seconds:.0f} s until they are "
            f"measured: {self.margin.state_bytes / 1e9:.2g} GB at {GUESSED_BYTES_S / 1e9:g} GB/s)"
        )


def make_deadline(config: Config) -> Deadline:
    """Return the deadline of this process's run. config: with its model known."""
    limits, data = config.limits, config.data
    batches = data.validation_sequences / data.global_batch if config.log.validation_every_steps else 0.0
    margin = Margin(limits.margin_s, BYTES_A_PARAMETER * parameter_count(config.model), batches)
    return Deadline(limits.wall_s, margin, batch_job())


@dataclass
class RequestListener:
    """Collects the requests that reach one rank.

    log, deadline: rank 0's, which alone looks into the folder and at the clock; None on the others.
    """

    folder: Path
    signals: StopSignals
    last_step: int
    log: Log | None
    deadline: Deadline | None
    _looked_s: float = -LOOK_EVERY_S
    _files: frozenset[str] = frozenset()
    _saving: int | None = None  # the step at which a SAVE was agreed on, until its checkpoint is on disk

    def at_start(self, steps: int) -> Requests:
        """Return a STOP that is there before the first of `steps` steps; print how much time there is. For rank 0.

        Waits a moment for the batch system's first answer.
        """
        if steps <= 0:
            return Requests()
        if self.log and self.deadline:
            if self.deadline.job:
                self.deadline.job.ask_first()
            for line in self.deadline.lines():
                self.log.print(line)
        self._look()
        requests = Requests.from_sums(_counts({STOP} & self._files))
        if self.log and requests.stop:
            self.log.print(f"makes no step: {requests.why}, which is removed; the same command goes on")
        return requests

    def poll(self) -> RequestCounts:
        """Return this rank's part of the sum that ends a step."""
        names = {self.signals.received} & set(REASONS)
        if not self.deadline:
            return _counts(names)
        self._look()
        if self.deadline.is_near():
            names.add(TIME)
        return _counts(names | self._files, self.deadline.left_s, self.deadline.margin.seconds)

    def agreed(self, requests: Requests, step: int, step_s: float) -> None:
        """Take note of what all ranks have agreed on after `step`, which took step_s."""
        if self.deadline:
            self.deadline.margin.step(step_s)
        if requests.save and self._saving is None:
            self._saving = step
            self._files -= {SAVE}  # requested once, however long it is until the next look
            self._print(f"step {step}: a file SAVE is there, so a checkpoint is written")
        if requests.stop and step < self.last_step:
            self._print(f"stops after step {step}, with a checkpoint: {requests.why}")

    @contextmanager
    def timing_validation(self) -> Iterator[None]:
        """Time a validation in mid-run, for which the margin must have room."""
        start_s = time.perf_counter()
        yield
        if self.deadline:
            self.deadline.margin.validation(time.perf_counter() - start_s)

    def saved(self, newest: Path | None, longest_s: float) -> None:
        """Remove SAVE if its checkpoint is on disk. longest_s: the longest write of this start."""
        if self.deadline:
            self.deadline.margin.write(longest_s)
        if self._saving is not None and newest and (step_of(newest) or 0) >= self._saving:
            self._saving = None
            self._remove(SAVE)

    def close(self) -> None:
        """Remove the files of requests: the run has ended, and everything that it had to write is on disk."""
        if self._saving is not None:
            self._remove(SAVE)
        self._remove(STOP)

    def _print(self, text: str) -> None:
        if self.log:
            self.log.print(text)

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            names = (STOP,) if self._saving is not None else (STOP, SAVE)
            self._files = frozenset(name for name in names if os.path.lexists(self.folder / name))

    def _remove(self, name: str) -> None:
        if self.deadline:
            self._files -= {name}
            with contextlib.suppress(OSError):  # already gone, or not ours to remove: the run is not harmed
                (self.folder / name).unlink()


def make_listener(folder: Path, signals: StopSignals, config: Config, log: Log | None) -> RequestListener:
    """Return the listener of a run in `folder`. config: with its model known. log: rank 0's."""
    return RequestListener(folder, signals, config.run.steps, log, make_deadline(config) if log else None)


def _counts(names: Collection[str], left_s: float = 0.0, margin_s: float = 0.0) -> RequestCounts:
    found = np.array([*(name in names for name in (*REASONS, SAVE)), 0, 0], dtype=np.float64)
    if TIME in names:
        found[-2:] = left_s, margin_s
    return found
