"""What a run is asked for while it trains, and how all ranks come to know of it after the same step.

    any rank   SIGTERM, SIGUSR1, Ctrl-C ---------------+
    rank 0     a file STOP or SAVE in the run folder --+--> one number each in the sum that ends a step --> Wish
               the time limit is near -----------------+         (metrics travel in the same one)

After a SAVE the run goes on, and the file goes when the checkpoint is on disk. All else ends the run with a checkpoint
and an exit code that says: to be continued; a file STOP goes with it. A STOP that is there before the first step is
heeded too, and no step is made: whoever put it there wants none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcllm.checkpoint.folder import step_of
from hpcllm.config import Config
from hpcllm.deadline import Deadline, deadline_of
from hpcllm.job import StopSignals
from hpcllm.metrics import Log

LOOK_EVERY_S = 1.0  # for files, on rank 0
STOP, SAVE, TIME = "STOP", "SAVE", "TIME"
# the first one that is asked for is the reason given; people first
REASONS = (STOP, "SIGINT", "SIGTERM", "SIGUSR1", TIME)
ASKED = (*REASONS, SAVE, "left_s", "margin_s")  # what travels; the last two from rank 0 with TIME
REQUEUED = (TIME, "SIGTERM", "SIGUSR1")  # asked by the batch system, not by a person who wants the run to end

Asked = NDArray[np.float64]  # (len(ASKED),)
NOTHING: Asked = np.zeros(len(ASKED))


@dataclass(frozen=True)
class Wish:
    """What all ranks know after a step, the same everywhere."""

    save: bool = False
    reason: str = ""  # one of REASONS if the run is to stop
    why: str = ""  # in words

    @property
    def stops(self) -> bool:
        return bool(self.reason)


def wish_of(sums: Asked) -> Wish:
    """What `asked` of all ranks, added up, comes to."""
    asked = dict(zip(ASKED, sums.tolist(), strict=True))
    reason = next((name for name in REASONS if asked[name]), "")
    words = {
        STOP: "a file STOP in the run folder",
        TIME: f"the time limit: {_left(asked['left_s'])}, the margin is {asked['margin_s']:.0f} s",
    }
    return Wish(bool(asked[SAVE]), reason, words.get(reason, reason))


def _left(seconds: float) -> str:
    return f"{seconds:.0f} s were left" if seconds >= 0 else f"it was {-seconds:.0f} s ago"


def keeps_from_queue(wish: Wish, steps_made: int) -> str:
    """Why a run that stopped like this does not go back into the queue, nothing if it may."""
    if wish.reason not in REQUEUED:
        return f"somebody asked it to stop, by {wish.why}"
    if not steps_made:
        return "this start made no step, and the next would make none either"
    return ""


@dataclass
class Wishes:
    """One rank's ears. log, deadline: rank 0's, which alone looks into the folder and at the clock; else None."""

    folder: Path
    signals: StopSignals
    last_step: int
    log: Log | None
    deadline: Deadline | None
    _looked_s: float = -LOOK_EVERY_S
    _files: frozenset[str] = frozenset()
    _saving: int | None = None  # the step at which a SAVE was agreed on, until its checkpoint is on disk

    def at_start(self, steps: int) -> Wish:
        """For rank 0: whether somebody wants no step at all of those that are to be made. Says how much time there is.

        Waits a moment for the batch system's first answer.
        """
        if steps <= 0:
            return Wish()
        if self.log and self.deadline:
            self.deadline.open()
            for line in self.deadline.lines():
                self.log.say(line)
        self._look()
        wish = wish_of(_asked({STOP} & self._files))
        if self.log and wish.stops:
            self.log.say(f"makes no step: {wish.why}, which is removed; the same command goes on")
        return wish

    def asked(self) -> Asked:
        """This rank's part of the sum, after a step."""
        names = {self.signals.received} & set(REASONS)
        if not self.deadline:
            return _asked(names)
        self._look()
        if self.deadline.is_near():
            names.add(TIME)
        return _asked(names | self._files, self.deadline.left_s, self.deadline.margin.seconds)

    def heard(self, wish: Wish, step: int, step_s: float) -> None:
        """All ranks have agreed on it after `step`, which took so long."""
        if self.deadline:
            self.deadline.margin.step(step_s)
        if wish.save and self._saving is None:
            self._saving = step
            self._files -= {SAVE}  # asked for once, however long it is until the next look
            self._say(f"step {step}: a file SAVE is there, so a checkpoint is written")
        if wish.stops and step < self.last_step:
            self._say(f"stops after step {step}, with a checkpoint: {wish.why}")

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Around a validation in mid-run, for which there must be time."""
        start_s = time.perf_counter()
        yield
        if self.deadline:
            self.deadline.margin.validation(time.perf_counter() - start_s)

    def saved(self, newest: Path | None, longest_s: float) -> None:
        """The newest checkpoint that is on disk; the longest that a write has taken in this start."""
        if self.deadline:
            self.deadline.margin.write(longest_s)
        if self._saving is not None and newest and (step_of(newest) or 0) >= self._saving:
            self._saving = None
            self._remove(SAVE)

    def over(self) -> None:
        """The run has ended, and all that it had to write is on disk."""
        if self._saving is not None:
            self._remove(SAVE)
        self._remove(STOP)

    def _say(self, text: str) -> None:
        if self.log:
            self.log.say(text)

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            names = (STOP,) if self._saving is not None else (STOP, SAVE)
            self._files = frozenset(name for name in names if os.path.lexists(self.folder / name))

    def _remove(self, name: str) -> None:
        if self.deadline:
            self._files -= {name}
            with contextlib.suppress(OSError):  # gone by itself, or not ours to remove: the run is none the worse
                (self.folder / name).unlink()


def open_wishes(folder: Path, signals: StopSignals, config: Config, log: Log | None) -> Wishes:
    """config: with its model known. log: rank 0's."""
    return Wishes(folder, signals, config.run.steps, log, deadline_of(config) if log else None)


def _asked(names: Collection[str], left_s: float = 0.0, margin_s: float = 0.0) -> Asked:
    found = np.array([*(name in names for name in (*REASONS, SAVE)), 0, 0], dtype=np.float64)
    if TIME in names:
        found[-2:] = left_s, margin_s
    return found
