"""Seconds of the training loop by kind: the time between two calls of `end` belongs to the interval that ends there.

    loop       | samples, passes      | agree  | update    | log     | validate   | save       |
    intervals  ^    input, compute    ^  other ^ optimizer ^ between ^ validation ^ checkpoint ^     and time waited
               `------------ a step ---------------------'   `------ between two steps ------'

On each rank the intervals and the time waited add up to the time that has passed, exactly. Means over the ranks are
made into the parts of a step by `split`. On a GPU, whose work goes on behind Python's back, an interval lasts until the
host next waits for the device, which it does at the end of the passes: work that the update leaves on the device is
counted as the next step's compute.

    compute         forward and backward passes, with coding and Python
    optimizer       clipping and update
    input           reading samples
    bubble          idle time that the schedule implies for that much compute, if all stages are equally fast and a
                    backward pass takes two forward passes; never more than was waited in the pipeline and for others
    communication   all other waiting: for messages, for sums that are not hidden, for slower ranks
    other           the rest: agreeing on a step, losing time

Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

STEP = ("input", "compute", "optimizer", "other")  # intervals of a step, in which waiting is counted apart
BETWEEN = ("between", "checkpoint", "validation")  # intervals between two steps, including their waiting
# all that a rank spends, for the sum over all ranks; meters: 1 while the energy of the rank's node is being read
SPENT = (*STEP, *BETWEEN, "waited", "tensor_wait", "joules", "gpu_joules", "meters")
PARTS = ("compute", "optimizer", "communication", "bubble", "input", "other")  # of step_s; they add up to it
Spent = NDArray[np.float64]  # (len(SPENT),)
NOTHING_SPENT: Spent = np.zeros(len(SPENT))


@dataclass
class StepTimer:
    """Times the intervals of one rank. waited: returns the seconds that this rank has waited so far, for anything."""

    waited: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STEP, *BETWEEN, "waited"), 0.0))

    def __post_init__(self) -> None:
        self._last_s, self._last_waited_s = self.clock(), self.waited()

    def end(self, interval: str, input_s: float = 0.0) -> None:
        """End an interval: the time since the last call is counted as `interval`, except input_s of it, as input."""
        now_s, waited_s = self.clock(), self.waited()
        apart_s = 0.0 if interval in BETWEEN else waited_s - self._last_waited_s
        self.seconds["waited"] += apart_s
        self.seconds["input"] += input_s
        self.seconds[interval] += now_s - self._last_s - apart_s - input_s
        self._last_s, self._last_waited_s = now_s, waited_s


def split(step_s: float, means: Mapping[str, float], tensor_wait_s: float, bubble: float) -> dict[str, float]:
    """Split a step into seconds by PARTS, none below zero; they add up to step_s.

    means: mean over the ranks of a step's intervals and "waited". tensor_wait_s: the part of "waited" inside the layers
    that tp splits, where no bubble is. bubble: share of a step that the schedule idles.
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
    # intervals end with the passes, step_s with the update: the sum may be a little more than the step
    scale = min(1.0, step_s / sum(known.values())) if any(known.values()) else 1.0
    known = {name: scale * time_s for name, time_s in known.items()}
    return {**known, "other": max(0.0, step_s - sum(known.values()))}
