"""Checks of a fit: times are made from an alpha and a beta, disturbed as they are on a machine; both have to come back.

seconds |                  . '     nothing      every time lies on the line
        |            . '           sizes        each size is off by a little: other protocols, caches
        |    o . '                 late repeats some come late, by other work on the machine
        +----------- bytes         order        the sizes are shuffled
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcllm.course.lab import LawError, Trial

FIT_SHARE = 0.1  # by which alpha and beta may be off
SIZE_SHARE = 0.02  # by which a size is off
UNITS = (1e3, 1e6, 1e9, 4, 8, 1 / 4, 1 / 8)  # a mistaken unit makes alpha or beta so many times as large
HINTS = {
    "pair": "fit returns two numbers, alpha_s and beta_s.",
    "swapped": "alpha_s and beta_s have changed places; np.polyfit gives the slope first.",
    "bandwidth": "beta_s is seconds a byte, 1 / bandwidth.",
    "fit_unit": "alpha_s is in seconds, beta_s in seconds a byte: not in microseconds, nor for each value or bit.",
    "smallest": "The time of the smallest message is alpha + beta times its bytes, which is not alpha alone.",
    "late": "Some repeats came late, by other work on the machine. A mean takes that in; take the "
    "median or the least of each size.",
    "weights": "beta is right, alpha is not: 2 % of the longest time is far more than alpha, and plain "
    "least squares counts all alike. Let each error count as a share of its time: divide both sides by the time, or "
    "np.polyfit(..., w=1 / times).",
    "order": "The sizes may come in any order: the first need not be the smallest.",
    "line": "This is no line alpha + beta b through the times. Try fit on times that you make from an alpha and a "
    "beta by hand.",
}


def lines(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield what disturbs a line: nothing, each size a little, some repeats much; the order last."""
    for disturbed in ("nothing", "sizes", "late repeats", "order"):
        for _ in range(3):
            alpha_s = 10 ** drawn.uniform(-6, -5)
            beta_s = 10 ** drawn.uniform(-10, -9)  # sizes up to 1.2 GB
            yield {"disturbed": disturbed, "alpha_s": alpha_s, "beta_s": beta_s}


def samples(trial: Trial) -> tuple[list[int], list[list[float]]]:
    """Make the times of a case: sizes from half of alpha / beta to some thousand times as much."""
    alpha_s, beta_s, disturbed = (trial.case[key] for key in ("alpha_s", "beta_s", "disturbed"))
    sizes = [max(1, round(alpha_s / beta_s / 2 * 2.5**power)) for power in range(12)]
    seconds = []
    for size in sizes:
        share = 0.0 if disturbed == "nothing" else trial.random.uniform(-SIZE_SHARE, SIZE_SHARE)
        seconds.append([(alpha_s + beta_s * size) * (1 + share)] * 10)
    if disturbed in ("late repeats", "order"):
        for repeats in seconds:
            for place in trial.random.sample(range(10), 2):
                repeats[place] *= trial.random.uniform(3, 10)
    if disturbed != "order":
        return sizes, seconds
    order = [5, 3, 4, 0, 11, 1, 8, 2, 10, 9, 7, 6]
    return [sizes[place] for place in order], [seconds[place] for place in order]


def check_fit(trial: Trial) -> None:
    """Compare the line with the one that the times were made from."""
    sizes, seconds = samples(trial)
    found = trial.student.fit(list(sizes), [list(repeats) for repeats in seconds])
    if not (isinstance(found, Sequence | np.ndarray) and len(found) == 2):
        raise LawError("pair", f"fit returns {found!r:.60}, not alpha_s and beta_s")
    wanted = trial.case["alpha_s"], trial.case["beta_s"]
    off = [found[0] / wanted[0], found[1] / wanted[1]]
    if not all(abs(share - 1) <= FIT_SHARE for share in off):
        shown = (
            f"fit gives ({found[0]:.3g}, {found[1]:.3g}); the times were made from ({wanted[0]:.3g}, {wanted[1]:.3g})"
        )
        raise LawError(fit_mistake(found, wanted, seconds, trial.case["disturbed"]), shown)


def fit_mistake(found: Any, wanted: Sequence[float], seconds: list[list[float]], disturbed: str) -> str:
    """Tell a known mistake from a fit: key of the hint."""
    alpha_s, beta_s = wanted
    if near(found[1], alpha_s) and near(found[0], beta_s):
        return "swapped"
    if near(found[1] * beta_s, 1) and near(found[0], alpha_s):
        return "bandwidth"
    if disturbed == "order":
        return "order"
    units = [near(found[place], wanted[place] * unit) for place in (0, 1) for unit in UNITS]
    if disturbed == "nothing" and any(units):
        return "fit_unit"
    if near(found[0], min(map(min, seconds)), 2 * SIZE_SHARE) and near(found[1], beta_s):
        return "smallest"
    if disturbed == "late repeats":
        return "late"
    return "weights" if disturbed == "sizes" and near(found[1], beta_s) else "line"


def near(found: float, wanted: float, share: float = FIT_SHARE) -> bool:
    """Return True if a number is within a share of another."""
    return abs(found - wanted) <= share * abs(wanted)
