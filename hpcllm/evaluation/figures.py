"""Figures with their uncertainty: means and shares over examples, loss and bits per byte over rows of a store.

    share      s = hits / n             standard error sqrt(s (1 - s) / (n - 1)), as lm-eval; interval: Wilson's
    mean       m = sum x / n            standard error sqrt(sum (x - m)^2 / (n - 1) / n), as lm-eval; m +- 1.96 of it
    ratio      r = sum x / sum y        sqrt(n / (n - 1) sum (x - r y)^2) / sum y: rows count by their tokens or bytes
    exp of any                          the interval's ends likewise; standard error by the delta method

All intervals are of 95 %, and are of the choice of examples alone: neither of the training nor of the question whether
the examples stand for anything. Wilson 1927: within 0 and 1, and of some width where all examples are right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # of 95 %

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A measured value, its standard error (None: of one example) and the interval of 95 %."""

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the figure for --json."""
        values = {"value": self.value, "stderr": self.stderr, "low": self.low, "high": self.high}
        return {key: x if x is not None and math.isfinite(x) else None for key, x in values.items()}


def share(hits: Values) -> Figure:
    """Return the share of examples that are right. hits: (n,) of 0 and 1, n > 0."""
    figure = mean(hits)
    n, value = len(hits), figure.value
    middle = (value + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(value * (1 - value) / n + Z * Z / (4 * n * n))
    return Figure(value, figure.stderr, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half)))


def mean(values: Values) -> Figure:
    """Return the mean of values (n,), n > 0."""
    return ratio(values, np.ones(len(values)))


def ratio(above: Values, below: Values) -> Figure:
    """Return sum of `above` / sum of `below`, both (n,), of rows that are drawn alike; the latter's sum is above 0."""
    total, n = float(below.sum()), len(above)
    value = float(above.sum()) / total
    if n < 2:
        return Figure(value)
    stderr = math.sqrt(n / (n - 1) * float(((above - value * below) ** 2).sum())) / total
    return Figure(value, stderr, value - Z * stderr, value + Z * stderr)


def exponential(figure: Figure) -> Figure:
    """Return exp of a figure: of a loss in nats, the perplexity. Infinite where that is too large a number."""
    value, low, high = (None if x is None else _exp(x) for x in (figure.value, figure.low, figure.high))
    assert value is not None
    return Figure(value, None if figure.stderr is None else value * figure.stderr, low, high)


def as_dicts(figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Return figures for --json."""
    return {name: figure.as_dict() for name, figure in figures.items()}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
