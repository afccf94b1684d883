"""Pictures of parts: seconds of a step, stacked over the steps and as one bar a run; memory, a bar a stage.

s |####====----....      over the steps: compute at the foot, waiting above it, what lies between steps on top
  +--------------- step
a |######====--..|       one bar a run
b |####=======---..|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcllm.report.drawing import INK, figure, svg
from hpcllm.report.log import History, number
from hpcllm.report.thin import thin, usual_top

# from the foot; neighbours differ in lightness, so that they differ in greyscale too
TIME_COLOURS = {
    "compute": "#0072b2",
    "optimizer": "#8fcbee",
    "communication": "#d55e00",
    "bubble": "#f5cf73",
    "input": "#009e73",
    "other": "#c8c8c8",
    "between": "#7a7a7a",
    "checkpoint": "#e3a9c6",
    "validation": "#8f4a76",
}
TIME_WORDS = {
    "compute": "computing",
    "optimizer": "clipping and update",
    "communication": "exposed communication",
    "bubble": "bubble",
    "input": "reading samples",
    "other": "other",
    "between": "logs, traces, hashes",
    "checkpoint": "checkpoints",
    "validation": "validation",
}
MEMORY_COLOURS = {"parameters": "#0072b2", "gradients": "#f5cf73", "optimizer": "#d55e00", "step": "#8fcbee"}
POINTS = 300
BAR_INCHES = 0.34
SMALLEST = 0.055  # share of the longest bar that has room for a number
DARK = {"#0072b2", "#d55e00", "#009e73", "#7a7a7a", "#8f4a76"}


def time_over_steps(name: str, history: History) -> str:
    """ "" if the log has no such times."""
    keys = {part: f"time_{part}_s" for part in TIME_COLOURS}
    records = [record for record in history.steps if keys["compute"] in record]
    if len(records) < 2:
        return ""
    steps = [float(record["step"]) for record in records]
    columns = [thin(steps, [number(record.get(key)) for record in records], POINTS) for key in keys.values()]
    layers = [np.nan_to_num(column.mean) for column in columns]
    with figure(2.9) as (made, (axes,)):
        axes.stackplot(columns[0].x, layers, colors=list(TIME_COLOURS.values()), linewidth=0)
        axes.set_ylim(0, usual_top(np.sum(layers, axis=0).tolist()))
        axes.set_xlim(columns[0].x[0], columns[0].x[-1])
        axes.set_xlabel("step")
        axes.set_ylabel("seconds a step, a rank's mean")
        return svg(made, name, "where the seconds of a step go, over the steps")


def time_bars(name: str, splits: Mapping[str, Mapping[str, float]]) -> str:
    """label -> part -> mean seconds; "" if there are none."""
    rows = [
        (label, [(split.get(part, 0.0), TIME_COLOURS[part]) for part in TIME_COLOURS])
        for label, split in splits.items()
    ]
    return _bars(name, "where the seconds of a step go, in the mean", rows, "seconds a step, a rank's mean", 1.0)


def memory_bars(name: str, stages: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """(label, kind -> bytes) of each bar."""
    rows = [
        (label, [(float(sizes.get(kind, 0)), MEMORY_COLOURS[kind]) for kind in MEMORY_COLOURS])
        for label, sizes in stages
    ]
    longest = max((sum(size for size, _ in parts) for _, parts in rows), default=0.0)
    unit, size = ("GB", 1e9) if longest >= 1e9 else ("MB", 1e6)
    return _bars(name, "memory of tensors, the most of any rank of a stage", rows, unit, size)


def _bars(name: str, words: str, rows: Sequence[tuple[str, list[tuple[float, str]]]], unit: str, size: float) -> str:
    longest = max((sum(value for value, _ in parts) for _, parts in rows), default=0.0)
    if not longest:
        return ""
    with figure(BAR_INCHES * len(rows) + 0.7) as (made, (axes,)):
        for row, (_, parts) in enumerate(rows):
            _bar(axes, row, parts, longest, size)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        return svg(made, name, words)


def _bar(axes: Any, row: int, parts: Sequence[tuple[float, str]], longest: float, size: float) -> None:
    """A number stands in each part that has room for it."""
    left, total = 0.0, sum(value for value, _ in parts)
    for value, fill in parts:
        axes.barh(row, value / size, left=left / size, color=fill, height=0.74, edgecolor="white", linewidth=0.5)
        if value > SMALLEST * longest:
            ink = "white" if fill in DARK else "#222222"
            share = f"{100 * value / total:.0f} %"
            axes.text((left + value / 2) / size, row, share, ha="center", va="center", color=ink, fontsize=8)
        left += value
    beside = {
        "xytext": (4, 0),
        "textcoords": "offset points",
        "ha": "left",
        "va": "center",
        "color": INK,
        "fontsize": 8,
    }
    axes.annotate(f"{total / size:.3g}", (total / size, row), **beside)
