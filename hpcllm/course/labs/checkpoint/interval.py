"""Time that a job loses to failures, and the interval between checkpoints that loses least.

    |---- interval ----|cost|---- interval ----|cost|----- x            x: a failure; what came after the last
                                               |.........|             checkpoint is done again

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006; the square
root in it is J. W. Young's of 1974.
"""

from __future__ import annotations

import math

import numpy as np

NODES, NODE_YEARS, COST_S = 1000, 5, 30.0  # of the questions: a node fails once in 5 years
MTBF_S = NODE_YEARS * 365 * 86_400 / NODES  # of the job
ATTEMPTS = 400_000


def slowdown(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the expected seconds for a second of work: failures are exponential, restarts take no time."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Search the interval of least slowdown, in steps of a thousandth."""
    intervals = np.geomspace(cost_s / 10, 10 * mtbf_s, int(1000 * math.log(100 * mtbf_s / cost_s)))
    return float(min(intervals, key=lambda interval_s: slowdown(interval_s, cost_s, mtbf_s)))


def simulated_loss(interval_s: float, cost_s: float, mtbf_s: float, seed: int) -> float:
    """Simulate a job until ATTEMPTS intervals have ended or failed; returns the share of the time that is no work."""
    until_failure_s = np.random.default_rng(seed).exponential(mtbf_s, ATTEMPTS)
    whole_s = interval_s + cost_s
    succeeds = until_failure_s > whole_s
    return float(1 - interval_s * succeeds.sum() / np.minimum(until_failure_s, whole_s).sum())
