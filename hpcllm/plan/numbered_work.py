"""The work of a named schedule by numbers: what a search times and measures in thousands of layouts.

    lane          all passes of one op through one virtual stage         rank 1: F0.1 F1.1 F2.1 ... is one of its lanes
    pass          lane x microbatches + microbatch                       a whole number for a pair of rank and Action
    source        the pass that makes its input: the same microbatch, another lane; -1 is the data set
    order         all passes, none before its source; found once, for any number of clocks

The work, and who needs whose output, are those that the engine runs by (pipeline/schedules.py, pipeline/clock.py): an
order of numbers alone replaces tuples of tuples, of which a pipeline of 64 ranks has a hundred thousand. The clock does
the same sums as pipeline/clock.py does, so its times have the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    """Work of a schedule that runs to its end."""

    placement: Placement
    lanes: tuple[Lane, ...]
    rows: tuple[list[int], ...]  # passes of each rank, in its order
    microbatches: int

    @cached_property
    def sources(self) -> list[int]:
        """The source of each pass."""
        n, found = self.microbatches, []
        for lane in self.lanes:
            found += range(lane.source * n, (lane.source + 1) * n) if lane.source >= 0 else [-1] * n
        return found

    @cached_property
    def order(self) -> list[int]:
        """All passes, each rank's in its order, none before its source."""
        sources, order = self.sources, list[int]()
        done = bytearray(len(sources) + 1)
        done[-1] = True  # the data set
        rows, asleep = [iter(row) for row in self.rows], dict[int, list[tuple[int, int]]]()
        awake = [(rank, next(row)) for rank, row in enumerate(rows)]
        while awake:
            rank, number = awake.pop()
            while done[sources[number]]:
                order.append(number)
                done[number] = True
                awake += asleep.pop(number, ())
                number = next(rows[rank], -1)
                if number < 0:
                    break
            else:
                asleep.setdefault(sources[number], []).append((rank, number))
        return order

    @cached_property
    def steps(self) -> tuple[list[int], list[int], list[int]]:
        """Lane, rank and source of each pass, in the order."""
        n, sources = self.microbatches, self.sources
        lanes = [number // n for number in self.order]
        ranks = [lane.rank for lane in self.lanes]
        return lanes, [ranks[lane] for lane in lanes], [sources[number] for number in self.order]

    def ends(self, durations: Sequence[float], send: float = 0) -> list[float]:
        """Return when each pass ends: it starts once its rank is free and its input is there. durations: by lane.

        send: from the end of a pass to when its output is on another rank. As clock.clock, and with the same bits.
        """
        free, ends = [0.0] * len(self.rows), [0.0] * (len(self.sources) + 1)  # the last one: the data set
        delays = [send if lane.is_message else 0 for lane in self.lanes]
        for number, lane, rank, source in zip(self.order, *self.steps, strict=True):
            start, here = free[rank], ends[source] + delays[lane]
            free[rank] = ends[number] = (start if start > here else here) + durations[lane]
        return ends

    def rank_ends(self, durations: Sequence[float], send: float = 0) -> list[float]:
        """Return when each rank has done its last pass."""
        ends = self.ends(durations, send)
        return [ends[row[-1]] for row in self.rows]


@lru_cache(maxsize=64)
def numbered_work(schedule: str, ranks: int, chunks: int, microbatches: int) -> NumberedWork:
    """Make the work of a named schedule. Raises ScheduleError."""
    placement, work = make_work(schedule, ranks, microbatches, chunks)
    lanes = _lanes(placement, work)
    first = {(lane.rank, lane.op, lane.chunk): index * microbatches for index, lane in enumerate(lanes)}
    rows = []
    for rank, row in enumerate(work):
        mine = {key[1:]: number for key, number in first.items() if key[0] == rank}
        rows.append([mine[op, chunk] + microbatch for op, microbatch, chunk in row])
    return NumberedWork(placement, lanes, tuple(rows), microbatches)


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
