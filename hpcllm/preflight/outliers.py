"""Which of many equal parts is slower than the others, beyond their scatter. Pure.

    x x xx x xx     x    <- speeds      slow: below the median by five times the scatter, and by LEAST_SHARE of it
          |median
    scatter = 1.4826 x median of the distances to the median: that of a normal distribution, whatever a few do

Source: Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49. With two values nobody is in the middle: the
slower one is compared with the faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_SHARE = 0.10  # slower than that is told,
SLOW_SHARE = 0.25  # and than that is a finding that ends with exit code 1: all ranks wait for the slowest
_SCATTERS = 5 * 1.4826


def slow_ones(speeds: Sequence[float]) -> list[tuple[int, float]]:
    """(which, share of the usual speed that it lacks), the slowest first. NaN: not measured, compared with nobody."""
    known = [speed for speed in speeds if not math.isnan(speed)]
    if len(known) < 2:
        return []
    usual = max(known) if len(known) == 2 else statistics.median(known)
    scatter = 0.0 if len(known) == 2 else statistics.median(abs(speed - usual) for speed in known)
    least = usual - max(_SCATTERS * scatter, LEAST_SHARE * usual)
    found = [(which, 1 - speed / usual) for which, speed in enumerate(speeds) if speed < least]
    return sorted(found, key=lambda pair: -pair[1])
