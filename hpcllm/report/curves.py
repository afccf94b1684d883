r"""Curves over the steps of a run, or of several: one panel a quantity, one under the other.

loss |\                      line      mean, where there are more points than a picture can show
     | \.__ o                band      between the lowest and the highest of them
     |  :  '--.o__           o         measured now and then, as validation
     +--:---------- step     :         a start that went on from a checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcllm.report.drawing import INK, colour, dashes, figure, svg
from hpcllm.report.thin import thin, usual_top

PANEL_INCHES, AXIS_INCHES = 2.1, 0.5
POINTS = 900  # of a curve; fewer where there are many
ALL_POINTS = 40_000


@dataclass(frozen=True)
class Curve:
    x: Sequence[float]
    y: Sequence[float]
    number: int = 0  # which colour and dashes
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    label: str  # of the axis, with the unit
    curves: Sequence[Curve]
    from_zero: bool = False  # a quantity of which the height counts; far outliers are then cut off
    log: bool = False


def draw(name: str, words: str, panels: Sequence[Panel], resumes: Sequence[float] = (), log_x: bool = False) -> str:
    """All panels as one picture, "" if there is nothing to see. resumes: steps that a later start went on from."""
    panels = [panel for panel in panels if any(np.isfinite(curve.y).any() for curve in panel.curves if len(curve.y))]
    if not panels:
        return ""
    most = min(POINTS, ALL_POINTS // sum(len(panel.curves) for panel in panels))
    with figure(PANEL_INCHES * len(panels) + AXIS_INCHES, len(panels)) as (made, axes):
        for panel, each in zip(panels, axes, strict=True):
            _panel(each, panel, max(most, 50))
            for step in resumes:
                each.axvline(step, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), alpha=0.6)
        if log_x:
            axes[-1].set_xscale("log")
        axes[-1].set_xlabel("step")
        _plain_steps(axes[-1], log_x)
        made.align_ylabels(axes)
        return svg(made, name, words)


def _panel(axes: Any, panel: Panel, most: int) -> None:
    values: list[float] = []
    for curve in panel.curves:
        points = thin(curve.x, curve.y, most)
        style = {"color": colour(curve.number), "linestyle": dashes(curve.number)}
        mark = {"marker": "o", "markersize": 4} if curve.dots or np.isfinite(points.mean).sum() == 1 else {}
        axes.plot(points.x, points.mean, **style, **mark)
        if points.was_thinned:
            axes.fill_between(points.x, points.low, points.high, color=style["color"], alpha=0.2, linewidth=0)
        values += points.mean.tolist()
    axes.set_ylabel(panel.label)
    if panel.log:
        axes.set_yscale("log")
    elif panel.from_zero:
        axes.set_ylim(0, usual_top(values))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _plain_steps(axes: Any, log_x: bool) -> None:
    """Steps are whole numbers, with commas."""
    from matplotlib.ticker import MaxNLocator

    if not log_x:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=(1, 2, 2.5, 5, 10)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
