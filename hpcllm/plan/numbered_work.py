"""The work of a named schedule by numbers: what a search times and measures in thousands of layouts.

    pass        its place in an order in which all can happen, from 1       F0 of rank 0 = 1, F1 = 2, ... F0 of rank 1
    source      the pass that makes its input, which has a smaller number; 0: the data set
    lane        all passes of one op through one virtual stage              F0.1 F1.1 F2.1 ... of rank 1: one duration

The work, and who needs whose output, are those that the engine runs by (pipeline/schedules.py, pipeline/clock.py), but
lists of numbers take the place of tuples of tuples, of which a pipeline of 64 ranks has a hundred thousand. The clock
does the sums of pipeline/clock.py, so its times have the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.clock import Work, compute_needs
from hpcllm.pipeline.schedules import make_work


class Lane(NamedTuple):
    """All passes of one op through one virtual stage."""

    rank: int
    op: Op
    chunk: int
    source: int  # lane that makes its input; -1: the data set
    is_message: bool  # its input comes from another rank


@dataclass(frozen=True)
class NumberedWork:
    """Work of a schedule that runs to its end; the lists go by pass, from the first."""

    placement: Placement
    lanes: tuple[Lane, ...]
    lane: list[int]
    rank: list[int]
    source: list[int]
    rows: list[list[int]]  # passes of each rank, in its order

    def ends(self, durations: Sequence[float], send: float = 0) -> list[float]:
        """Return when each pass ends, behind the 0 of the data set. durations: by lane.

        A pass starts once its rank is free and its input is there. send: from the end of a pass to when its output is
        on another rank. As clock.clock, and with the same bits.
        """
        free, ends = [0.0] * len(self.rows), [0.0]
        delays = [send if lane.is_message else 0 for lane in self.lanes]
        for lane, rank, source in zip(self.lane, self.rank, self.source, strict=True):
            start, here = free[rank], ends[source] + delays[lane]
            free[rank] = end = (start if start > here else here) + durations[lane]
            ends.append(end)
        return ends

    def rank_ends(self, durations: Sequence[float], send: float = 0) -> list[float]:
        """Return when each rank has done its last pass."""
        ends = self.ends(durations, send)
        return [ends[row[-1]] for row in self.rows]


@lru_cache(maxsize=16)
def numbered_work(schedule: str, ranks: int, chunks: int, microbatches: int) -> NumberedWork:
    """Make the work of a named schedule. Raises ScheduleError."""
    placement, work = make_work(schedule, ranks, microbatches, chunks)
    lanes, n = _lanes(placement, work), microbatches
    at = {(lane.rank, lane.op, lane.chunk): index * n for index, lane in enumerate(lanes)}
    # for now, a pass is lane x microbatches + microbatch
    rows = [[at[rank, op, chunk] + microbatch for op, microbatch, chunk in row] for rank, row in enumerate(work)]
    source: list[int] = []
    for lane in lanes:
        source += range(lane.source * n, (lane.source + 1) * n) if lane.source >= 0 else [-1] * n
    order = _order(rows, source)
    number = [0] * (len(order) + 1)  # the last one: the data set
    for place, one in enumerate(order, 1):
        number[one] = place
    lane_of = [one // n for one in order]
    rank_of = [lanes[lane].rank for lane in lane_of]
    numbered = [[number[one] for one in row] for row in rows]
    return NumberedWork(placement, lanes, lane_of, rank_of, [number[source[one]] for one in order], numbered)


def _lanes(placement: Placement, work: Work) -> tuple[Lane, ...]:
    """List the lanes of all ranks. Of a named schedule all microbatches go the same way, so one shows the sources."""
    one = [[action for action in row if action.microbatch == 0] for row in work]
    keys = [(rank, op, chunk) for rank, row in enumerate(one) for op, _, chunk in row]
    place = {key: index for index, key in enumerate(keys)}
    needs, lanes = compute_needs(placement, one), []
    for rank, op, chunk in keys:
        source = needs(rank, Action(op, 0, chunk))
        if source is None:
            lanes.append(Lane(rank, op, chunk, -1, False))
        else:
            maker, made = source
            lanes.append(Lane(rank, op, chunk, place[maker, made.op, made.chunk], maker != rank))
    return tuple(lanes)


def _order(rows: Sequence[Sequence[int]], source: Sequence[int]) -> list[int]:
    """Sort passes such that each rank's are in its order, and none comes before its source; -1 is there at once."""
    order = list[int]()
    done = bytearray(len(source) + 1)
    done[-1] = True
    left, asleep = [iter(row) for row in rows], dict[int, list[tuple[int, int]]]()
    awake = [(rank, next(row)) for rank, row in enumerate(left)]
    while awake:
        rank, one = awake.pop()
        while done[source[one]]:
            order.append(one)
            done[one] = True
            awake += asleep.pop(one, ())
            one = next(left[rank], -1)
            if one < 0:
                break
        else:
            asleep.setdefault(source[one], []).append((rank, one))
    return order
