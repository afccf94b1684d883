"""Say how far off a predicted step time may be: what published runs were off by.

    ln(measured / predicted)     rows whose table chose a constant --> the widths here      perf/plan/compare.py
                                 rows held out                     --> how many lie inside: published.md

A width is the ceil(0.95 (n + 1))-th smallest of the n distances of its rows from 0, or the largest where there are too
few rows for that. Runs of many replicas are judged by themselves, for what they wait for is known least. The rows are
of GPUs and of other trainers than ours: of another kind of machine or model the error may be larger. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

INSIDE = 0.95  # share of runs that shall lie inside
MANY = 64  # replicas; from more of them on the second width holds
WIDTH, WIDTH_OF_MANY = 0.157, 0.245


def interval_s(step_s: float, replicas: int) -> tuple[float, float]:
    """Return the seconds between which a step lies that is predicted to take step_s."""
    factor = math.exp(WIDTH_OF_MANY if replicas > MANY else WIDTH)
    return step_s / factor, step_s * factor


def width(distances: list[float]) -> float:
    """Return the width of these |ln(measured / predicted)|."""
    return sorted(distances)[min(len(distances), math.ceil(INSIDE * (len(distances) + 1))) - 1]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation, -1 to 1; equal values share their ranks."""
    a, b = _ranks(first), _ranks(second)
    middle = (len(a) - 1) / 2
    covariance = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return covariance / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]
