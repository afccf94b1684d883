"""A curve of very many points as one of a few: means, with what lay below and above them.

..:.  :. .   .:     a bucket of neighbours     |  highest
 .:...::.::.:...           ---->               +  mean            in the order of x
                                               |  lowest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Thin:
    """(n,) each, n as was asked for at most. A bucket without one finite value is NaN."""

    x: Values
    mean: Values
    low: Values
    high: Values
    was_thinned: bool


def thin(x: Sequence[float], y: Sequence[float], most: int) -> Thin:
    """x, y: (n,), x ascending. NaN and infinities count nothing."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if not len(across):
        return Thin(across, up, up, up, False)
    finite = np.isfinite(up)
    if len(across) <= most:
        up = np.where(finite, up, np.nan)
        return Thin(across, up, up, up, False)
    edges = np.linspace(0, len(across), most + 1).astype(int)[:-1]
    counts = np.add.reduceat(finite.astype(np.float64), edges)
    some = counts > 0
    mean = np.add.reduceat(np.where(finite, up, 0.0), edges) / np.maximum(counts, 1)
    low = np.minimum.reduceat(np.where(finite, up, np.inf), edges)
    high = np.maximum.reduceat(np.where(finite, up, -np.inf), edges)
    mean, low, high = (np.where(some, values, np.nan) for values in (mean, low, high))
    return Thin(across[edges], mean, low, high, True)


def usual_top(values: Sequence[float]) -> float | None:
    """Where an axis may end so that a few outliers, as a first step that compiles, do not flatten the rest.

    None if nothing lies far above the others.
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) < 8:
        return None
    usual = 1.3 * float(np.percentile(finite, 95))
    return usual if 0 < usual < 0.7 * float(finite.max()) else None
