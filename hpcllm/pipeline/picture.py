"""The drawing of a timeline: a row a rank, a box an action, the number of its microbatch inside.

  1f1b, 2 ranks, 3 microbatches
  rank 0  [0][1]    [  0 ][2][  1 ]   [  2 ]    idle 25 %
  rank 1     [0][  0 ][1][  1 ][2][  2 ]        idle 25 %      colour says forward or backward; a bar at the foot
          0        5        10                  times          says that it is the rank's second chunk, and so on
  [] forward  [] backward

Several panels, as measured above ideal, share one scale of time. The colours go from light to dark in the order F, I,
B, W, so they are told apart in greyscale and by people who see fewer colours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcllm.pipeline.actions import Op
from hpcllm.pipeline.clock import Span
from hpcllm.pipeline.grid import Rows, round_step
from hpcllm.plotting import Box, Canvas, Label

COLOURS = {  # fill, colour of the number on it
    Op.FORWARD: ("#bfe0f7", "#222222"),
    Op.BACKWARD_INPUT: ("#eda63a", "#222222"),
    Op.BACKWARD: ("#b5520f", "#ffffff"),
    Op.BACKWARD_WEIGHT: ("#17435a", "#ffffff"),
}
MEANINGS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
}
IDLE, WAIT, EDGE, FAINT = "#f3f3f3", "#a8a8a8", "#ffffff", "#666666"
ROW, BAR, THIN, GAP = 26, 3, 4, 4  # pixels: a rank, the bar of a chunk, a wait, between rows
LEFT, RIGHT, TITLE, AXIS, LEGEND = 76, 96, 34, 30, 30
USUAL_BOX, NARROWEST, WIDEST = 24, 640, 6000  # pixels: an action of middle length; the plot
DIGIT = 0.66  # width of a digit, in its size


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture."""

    title: str
    rows: Rows
    until: float  # the length of the time axis
    right: tuple[str, ...]  # what is said at the end of each row
    waits: Sequence[Sequence[tuple[float, float]]] = ()  # start and end of each rank's waits, where they are known


def draw(panels: Sequence[Panel], unit: str) -> Canvas:
    """The picture of all panels, one under the other."""
    until = max(panel.until for panel in panels) or 1.0
    width = _plot_width(panels, until)
    shapes: list[Box | Label] = []
    top = 0.0
    for panel in panels:
        shapes += _panel(panel, top, width / until)
        top += TITLE + len(panel.rows) * (ROW + GAP)
        shapes += _axis(top, until, width, unit if panel is panels[-1] else "")
        top += AXIS
    shapes += _legend(panels, top + LEGEND / 2)
    return Canvas(LEFT + width + RIGHT, top + LEGEND + GAP, tuple(shapes))


def _plot_width(panels: Sequence[Panel], until: float) -> float:
    """Wide enough for the numbers in most boxes."""
    lengths = [end - start for panel in panels for row in panel.rows for _, start, end in row]
    usual = statistics.median_low(lengths) if lengths else until
    return min(WIDEST, max(NARROWEST, USUAL_BOX * until / usual if usual else 0))


def _panel(panel: Panel, top: float, scale: float) -> Iterator[Box | Label]:
    yield Label(LEFT, top + TITLE / 2, panel.title, size=14)
    lift = BAR if any(action.chunk for row in panel.rows for action, _, _ in row) else 0
    for rank, (row, right) in enumerate(zip(panel.rows, panel.right, strict=True)):
        y = top + TITLE + rank * (ROW + GAP)
        yield Label(LEFT - 10, y + ROW / 2, f"rank {rank}", anchor="end")
        yield Box(LEFT, y, panel.until * scale, ROW, IDLE)
        for start, end in panel.waits[rank] if panel.waits else ():
            yield Box(LEFT + start * scale, y + ROW / 2 - THIN / 2, (end - start) * scale, THIN, WAIT)
        for span in row:
            yield from _action(span, y, scale, lift)
        yield Label(LEFT + panel.until * scale + 8, y + ROW / 2, right)


def _action(span: Span, y: float, scale: float, lift: float) -> Iterator[Box | Label]:
    action, start, end = span
    x, width = LEFT + start * scale, (end - start) * scale
    fill, ink = COLOURS[action.op]
    line = min(1.0, width / 4)  # a white edge between neighbours
    yield Box(x, y, width, ROW, EDGE)
    yield Box(x, y, width - line, ROW, fill)
    for bar in range(action.chunk):
        foot = y + ROW - (BAR + 2) * bar
        yield Box(x, foot - BAR - 1, width - line, BAR + 1, EDGE)
        yield Box(x, foot - BAR, width - line, BAR, "#000000")
    text = str(action.microbatch)
    size = min(12.0, width / (DIGIT * len(text)) - 1)
    if size >= 6:
        yield Label(x + (width - line) / 2, y + ROW / 2 - lift, text, size, "middle", ink)


def _axis(top: float, until: float, width: float, unit: str) -> Iterator[Box | Label]:
    step = round_step(until * 70 / width)
    for k in range(math.floor(until / step + 1e-9) + 1):
        x = LEFT + k * step * width / until
        yield Box(x, top, 1, 5, FAINT)
        yield Label(x, top + 14, f"{k * step:.6g}", size=11, anchor="middle", fill=FAINT)
    yield Label(LEFT + width + 20, top + 14, unit, size=11, fill=FAINT)


def _legend(panels: Sequence[Panel], y: float) -> Iterator[Box | Label]:
    shown = {action for panel in panels for row in panel.rows for action, _, _ in row}
    entries = [(words, Box(0, -8, 16, 16, COLOURS[op][0])) for op, words in MEANINGS.items()]
    entries = [entry for entry, op in zip(entries, MEANINGS, strict=True) if op in {action.op for action in shown}]
    if any(action.chunk for action in shown):
        entries.append(("each bar: next chunk", Box(0, 8 - BAR, 16, BAR, "#000000")))
    if any(waits for panel in panels for waits in panel.waits):
        entries.append(("waiting", Box(0, -THIN / 2, 16, THIN, WAIT)))
    x = float(LEFT)
    for words, box in entries:
        yield Box(x, y + box.y, box.width, box.height, box.fill)
        yield Label(x + 22, y, words)
        x += 22 + 6.8 * len(words) + 24
