"""A timeline as text: a row a rank, time to the right, as wide as the terminal allows.

1f1b, 2 ranks, 3 microbatches, F=1 B=2, one tick a cell:           with less room, one tick a column:
rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---                        rank 0  FF..BbFBb.Bb
rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .                         rank 1  .FBbFBbFBb..

A name stands where its action starts, and dashes go on to its end. Without room for names, a capital starts an action
and small letters go on to its end. With still less room the middle, where all goes on as before, is left out at " ~ ".
Times that are no multiples of a tick are scaled: then a column may hide what is shorter. The grid says so. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.clock import Span

Rows = Sequence[Sequence[Span]]  # the spans of each rank
MARK_COLUMNS = 10  # from one number of the time axis to the next, at least
MOST_TICKS = 10_000  # a timeline of more has no tick worth a cell
CUT = " ~ "
NARROWEST = 20  # columns of a grid, however narrow the terminal
FINE = 3  # an action of more ticks than this is scaled down rather than cut out
MEANINGS = {
    Op.FORWARD: "forward pass of a microbatch",
    Op.BACKWARD: "its backward pass",
    Op.BACKWARD_INPUT: "its backward pass for the input only: the rank before waits for this gradient",
    Op.BACKWARD_WEIGHT: "the rest of its backward pass, for the weights: nobody waits for it, so it fills gaps",
}


@dataclass(frozen=True)
class Grid:
    """The mapping from the times of a timeline to columns of text."""

    scale: float  # columns a unit of time
    tick: float  # time of a cell; 0: the durations have no common measure
    named: bool  # names in the cells, else letters
    columns: int  # of a row, at most; a longer one loses its middle

    def row(self, spans: Sequence[Span], until: float) -> str:
        """Draw one rank's work up to a time, idle cells as points."""
        width = self._column(until)
        idle = ("." + " " * (self._cell - 1)) * -(-width // self._cell)
        row, at = "", 0
        for action, start, end in spans:
            first, after = self._column(start), self._column(end)
            row += idle[at:first] + self._cells(action, after - first)
            at = after
        return self._cut(row + idle[at:width], width)

    def axis(self, until: float) -> str:
        """Write times above the columns where they are."""
        step, width, row = round_step(MARK_COLUMNS / self.scale), self._column(until), ""
        for k in range(math.ceil(until / step)):
            at, mark = self._column(k * step), f"{k * step:.6g}"
            if any(at <= edge <= at + len(mark) for edge in (*self._edges(width), max(width, self.columns) + 1)):
                continue  # half a number would be another number
            row = f"{row:<{at}}{mark} "
        return self._cut(f"{row:<{width}}"[: max(width, len(row.rstrip()))], width)

    def has_room(self, span: Span) -> bool:
        """True if the name of an action and a space fit."""
        action, start, end = span
        return self._column(end) - self._column(start) > len(str(action))

    def note(self, unit: str, until: float) -> str:
        """Say what a column stands for, and what is lost."""
        if self.tick and self.named:
            return f"one cell: {_times(self.tick, unit)}"
        if self.tick and self.scale * self.tick >= 1:
            columns = "one column" if self._cell == 1 else f"{self._cell} columns"
            middle = f", and at {CUT.strip()} not for the middle" if self._edges(self._column(until)) else ""
            return f"{columns}: {_times(self.tick, unit)}; no room for microbatch numbers{middle}"
        lost = "" if self.named else "; what is shorter may be missing, and no room for microbatch numbers"
        return f"scaled to the width, one column: {_times(1 / self.scale, unit)}{lost}"

    def _cut(self, row: str, width: int) -> str:
        """Cut the middle out of a row if `width` is too much; its last number may be longer than that."""
        edges = self._edges(width)
        return (row[: edges[0]] + CUT + row[edges[1] :] if edges else row).rstrip()

    def _edges(self, width: int) -> tuple[int, ...]:
        """Begin and end of the middle that is left out, if it is."""
        half = (self.columns - len(CUT)) // 2
        return (half, width - half) if width > self.columns else ()

    @property
    def _cell(self) -> int:
        return max(1, round(self.scale * self.tick))

    def _column(self, time: float) -> int:
        if self.tick and self.scale * self.tick >= 1:  # where a cell begins
            return self._cell * _nearest(time / self.tick)
        return _nearest(time * self.scale)

    def _cells(self, action: Action, columns: int) -> str:
        if self.named:
            return f"{action!s:-<{columns - 1}} "
        return (action.op + action.op.lower() * columns)[:columns]


def fit(timelines: Sequence[Rows], columns: int) -> Grid:
    """Make the grid of at most so many columns for one timeline, or for several to be read one above the other."""
    spans = [span for rows in timelines for row in rows for span in row]
    longest = max((end for _, _, end in spans), default=0.0) or 1.0
    tick = common_tick((end - start for _, start, end in spans), longest)
    cell = 1 + max((len(str(action)) for action, _, _ in spans), default=1)
    if tick and round(longest / tick) * cell <= columns:
        return Grid(cell / tick, tick, named=True, columns=columns)
    scale = columns / longest
    if tick and (scale * tick >= 1 or min(end - start for _, start, end in spans) < FINE * tick):
        scale = max(1, math.floor(scale * tick + 1e-9)) / tick
    grid = Grid(scale, tick, named=True, columns=columns)
    return grid if all(map(grid.has_room, spans)) else replace(grid, named=False)


def fit_labelled(timelines: Sequence[Rows], columns: int) -> Grid:
    """Fit as `fit` does, with room for the labels of `timeline_lines`."""
    return fit(timelines, max(columns - _label_width(timelines[0]), NARROWEST))


def timeline_lines(grid: Grid, rows: Rows, until: float, unit: str) -> list[str]:
    """Draw one timeline: the axis, a labelled row for each rank, and what a column stands for."""
    width = _label_width(rows)
    ranks = [f"{f'rank {rank}':<{width}}{grid.row(row, until)}" for rank, row in enumerate(rows)]
    return [f"{'':<{width}}{grid.axis(until)}", *ranks, f"{'':<{width}}({grid.note(unit, until)})"]


def legend_lines(grid: Grid, rows: Rows) -> list[str]:
    """Explain the symbols in a grid of these rows."""
    actions = {action for row in rows for action, _, _ in row}
    ops, number = {action.op for action in actions}, "3" if grid.named else ""
    names = [f"{op + number:<5} {words}" for op, words in MEANINGS.items() if op in ops]
    if grid.named and any(action.chunk for action in actions):
        names.append("F3.1  the same in chunk 1, the rank's second piece of the model")
    names += [f"{'--' if grid.named else 'small':<5} it goes on", f"{'.':<5} the rank is idle"]
    return [f"  {name}" for name in names]


def _label_width(rows: Rows) -> int:
    return len(f"rank {len(rows) - 1}") + 2


def _nearest(value: float) -> int:
    """Round half up: what starts one later ends one later. What floating point left off is ignored."""
    return math.floor(value + 0.5 + 1e-9)


def common_tick(durations: Iterable[float], longest: float) -> float:
    """Find the largest time of which all durations are multiples, or 0 where there is none worth a cell."""
    nothing = longest * 1e-9  # what sums of floating point numbers may be off

    def measure(a: float, b: float) -> float:  # Euclid's, where what is nearly 0 is 0
        while b > nothing:
            a, b = b, abs(a - b * round(a / b))
        return a

    different = {round(duration / longest, 12) * longest for duration in durations}
    tick = reduce(measure, different, 0.0)
    if tick * MOST_TICKS < longest:
        return 0.0
    return max(different) / round(max(different) / tick)  # what Euclid's differences left off is divided out


def _times(time: float, unit: str) -> str:
    number = f"{time:.3g}"
    return f"{number} {'tick' if (number, unit) == ('1', 'ticks') else unit}"


def round_step(least: float) -> float:
    """Choose the distance of an axis's marks: 1, 2 or 5 times a power of ten, at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
