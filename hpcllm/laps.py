"""Where the seconds of the loop go: each stretch between two laps is one thing's, less what was waited in it.

    loop     | samples, passes      | agree  | update    | log     | validate   | save       |
    laps     ^    input, compute    ^  other ^ optimizer ^ between ^ validation ^ checkpoint ^      and what was waited
             `------------ a step ---------------------'   `------ between two steps ------'

On each rank the laps and what it waited add up to the time that has passed, exactly. Means over the ranks are made into
the parts of a step by `split`. On a GPU, whose work goes on behind Python's back, a lap lasts until the host next waits
for the device, which it does at the end of the passes: what the update leaves on the device is the next step's compute.

    compute         forward and backward passes, with coding and Python
    optimizer       clipping and update
    input           reading samples
    bubble          what the schedule lets a rank idle while that much is computed, if all stages are equally fast and
                    a backward pass takes two forward passes; never more than was waited in the pipeline and for others
    communication   all other waiting: for messages, for sums that are not hidden, for slower ranks
    other           the rest: agreeing on a step, losing time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STEP = ("input", "compute", "optimizer", "other")  # laps of a step, between which waiting is counted apart
BETWEEN = ("between", "checkpoint", "validation")  # laps of all that lies between two steps, with its waiting
PARTS = ("compute", "optimizer", "communication", "bubble", "input", "other")  # of step_s; they add up to it


@dataclass
class Laps:
    """One rank's. waited: seconds that this rank has waited so far, whatever for."""

    waited: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STEP, *BETWEEN, "waited"), 0.0))

    def __post_init__(self) -> None:
        self._last_s, self._last_waited_s = self.clock(), self.waited()

    def end(self, lap: str, input_s: float = 0.0) -> None:
        """What has passed since the last lap was `lap`'s, but for input_s of it."""
        now_s, waited_s = self.clock(), self.waited()
        apart_s = 0.0 if lap in BETWEEN else waited_s - self._last_waited_s
        self.seconds["waited"] += apart_s
        self.seconds["input"] += input_s
        self.seconds[lap] += now_s - self._last_s - apart_s - input_s
        self._last_s, self._last_waited_s = now_s, waited_s


def split(step_s: float, means: Mapping[str, float], tensor_wait_s: float, bubble: float) -> dict[str, float]:
    """Seconds of a step by PARTS, none below zero; they add up to step_s.

    means: of a step, over the ranks, by the names of laps and "waited". tensor_wait_s: the part of that which was
    waited inside the layers that tp splits, where no bubble is. bubble: share of a step that the schedule idles.
    """
    waited_s = means["waited"]
    idle_s = means["compute"] * bubble / (1 - bubble) if bubble < 1 else waited_s
    idle_s = max(0.0, min(idle_s, waited_s - tensor_wait_s))
    known = {
        "compute": means["compute"],
        "optimizer": means["optimizer"],
        "communication": waited_s - idle_s,
        "bubble": idle_s,
        "input": means["input"],
    }
    known = {name: max(0.0, time_s) for name, time_s in known.items()}
    # laps end with the passes, step_s with the update: the sum may be a little more than the step it is of
    scale = min(1.0, step_s / sum(known.values())) if any(known.values()) else 1.0
    known = {name: scale * time_s for name, time_s in known.items()}
    return {**known, "other": max(0.0, step_s - sum(known.values()))}
