"""Times of a race: the student's function, ours and the library's by turns, of which the fastest quarter counts.

With more ranks than cores, and others at work, a call takes what the operation needs, or that and some turns of other
processes. How many is luck, and a median has a part in it; the lower quartile has less, on both sides alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hpcllm.perf.timing import Case, in_turns

WARM_UP = 3  # rounds that do not count


def quartiles(comm: MPI.Intracomm, cases: Sequence[Case], rounds: int) -> list[float]:
    """Return the lower quartile of the seconds of each case, the slowest rank's. Collective over comm."""
    return [float(np.percentile(each.samples, 25)) for each in in_turns(comm, cases, rounds, WARM_UP, lambda: False)]
