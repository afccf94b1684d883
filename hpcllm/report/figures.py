r"""The figures of a report: curves over the steps, and stacked bars of seconds and of bytes.

loss |\                      line      mean, where there are more points than a picture can show
     | \.__ o                band      between the lowest and the highest of them
     |  :  '--.o__           o         measured now and then, as validation
     +--:---------- step     :         a start that went on from a checkpoint
        0.8 M       tokens             of each step that has a number, and the time since the start
        2.1         hours

..:.  :. .   .:     a bucket of neighbours     |  highest
 .:...::.::.:...    ---- downsample --->       +  mean            in the order of x
                                               |  lowest

Without matplotlib there are none: a report is then its tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm import plotting
from hpcllm.report.facts import Progress, large, settled, time_unit
from hpcllm.report.page import Figure
from hpcllm.report.run_folder import History, number

TIMES = {  # from the foot: label and colour; neighbours differ in lightness, so that they differ in greyscale too
    "compute": ("computing", "#0072b2"),
    "optimizer": ("clipping and update", "#8fcbee"),
    "communication": ("exposed communication", "#d55e00"),
    "bubble": ("bubble", "#f5cf73"),
    "input": ("reading samples", "#009e73"),
    "other": ("other", "#c8c8c8"),
    "between": ("logs, traces, hashes", "#7a7a7a"),
    "checkpoint": ("checkpoints", "#e3a9c6"),
    "validation": ("validation", "#8f4a76"),
}
MEMORY = {
    "parameters": ("parameters", "#0072b2"),
    "gradients": ("gradients", "#f5cf73"),
    "optimizer": ("optimizer", "#d55e00"),
    "step": ("activations and buffers", "#8fcbee"),
}
WIDTH_INCHES, PANEL_INCHES, AXIS_INCHES, BAR_INCHES, LEGEND_INCHES = 9.4, 2.1, 0.5, 0.34, 0.3
CURVE_POINTS, ALL_POINTS, STACK_POINTS, HOVER_POINTS = 900, 40_000, 300, 240
LEAST_SMOOTHED, SMOOTHED_SHARE = 20, 50  # values; half of a mean's window is one in so many of them
ROWS_INCHES = 0.35  # tokens and time below the steps
SECONDS = "seconds a step, a rank's mean"
Values = NDArray[np.float64]
Line = tuple[str, str, Values, Values]  # name, colour, x, y of a curve under the pointer


@dataclass(frozen=True)
class Curve:
    """y over x; number says which colour and dashes."""

    x: Sequence[float]
    y: Sequence[float]
    number: int = 0
    label: str = ""  # in the legend
    dots: bool = False
    faint: bool = False  # lies behind its smoothed self


def raw_and_smoothed(x: Sequence[float], y: Sequence[float], number: int, label: str) -> list[Curve]:
    """A curve as it was logged, faint, and its moving mean; the curve alone if it is short."""
    if len(y) < LEAST_SMOOTHED:
        return [Curve(x, y, number, label)]
    return [Curve(x, y, number, f"{label}, as logged", faint=True), Curve(x, smoothed(y).tolist(), number, label)]


def smoothed(y: Sequence[float]) -> Values:
    """Mean of each value and as many neighbours before as behind it, fewer at the ends; without NaN and infinities."""
    values = np.asarray(y, dtype=np.float64)
    n, finite = len(values), np.isfinite(values)
    places = np.arange(n)
    half = np.minimum(np.minimum(places, n - 1 - places), max(1, n // SMOOTHED_SHARE))
    ends = places + half + 1, places - half
    sums, counts = (
        np.concatenate([[0.0], np.cumsum(each)]) for each in (np.where(finite, values, 0.0), finite.astype(np.float64))
    )
    of_each = counts[ends[0]] - counts[ends[1]]
    means = (sums[ends[0]] - sums[ends[1]]) / np.maximum(of_each, 1)
    return np.where(of_each > 0, means, np.nan)


@dataclass(frozen=True)
class Panel:
    """One plot of a figure."""

    label: str  # of the y axis, with the unit
    curves: Sequence[Curve]
    from_zero: bool = False  # a quantity whose height counts; far outliers are then cut off
    log: bool = False


@dataclass(frozen=True)
class Downsampled:
    """A curve of at most as many points as requested, (n,) each; a bucket without one finite value is NaN."""

    x: Values
    mean: Values
    low: Values
    high: Values
    averaged: bool  # several values make a point


def downsample(x: Sequence[float], y: Sequence[float], most: int) -> Downsampled:
    """Average neighbours until `most` points are left. x, y: (n,), x ascending; NaN and infinities are left out."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    finite = np.isfinite(up)
    if len(across) <= most:
        up = np.where(finite, up, np.nan)
        return Downsampled(across, up, up, up, False)
    edges = np.linspace(0, len(across), most + 1).astype(int)[:-1]
    counts = np.add.reduceat(finite.astype(np.float64), edges)
    low = np.minimum.reduceat(np.where(finite, up, np.inf), edges)
    high = np.maximum.reduceat(np.where(finite, up, -np.inf), edges)
    shares = np.repeat(1 / np.maximum(counts, 1), np.diff(edges, append=len(up)))
    with np.errstate(over="ignore"):  # shares of the largest floats may sum up to just above them
        mean = np.clip(np.add.reduceat(np.where(finite, up, 0.0) * shares, edges), low, high)
    mean, low, high = (np.where(counts > 0, values, np.nan) for values in (mean, low, high))
    return Downsampled(across[edges], mean, low, high, True)


def usual_top(values: Sequence[float]) -> float | None:
    """Upper end of an axis, so that a few outliers, as a first step that compiles, do not flatten the rest.

    None if nothing lies far above the others.
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) < 8:
        return None
    usual = 1.3 * float(np.percentile(finite, 95))
    return usual if 0 < usual < 0.7 * float(finite.max()) else None


def curves(
    alt: str,
    panels: Sequence[Panel],
    resumes: Sequence[float] = (),
    log_x: bool = False,
    caption: str = "",
    progress: Progress | None = None,
) -> list[Figure]:
    """All panels as one figure; none if there is nothing to see. resumes: steps that a later start went on from.

    progress: tokens and hours of the steps, of one run; the axis then has them too.
    """
    panels = [panel for panel in panels if any(np.isfinite(curve.y).any() for curve in panel.curves if len(curve.y))]
    if not panels or not plotting.can_draw():
        return []
    most = max(50, min(CURVE_POINTS, ALL_POINTS // sum(len(panel.curves) for panel in panels)))
    has_legend = bool(resumes) or any(curve.label for panel in panels for curve in panel.curves)
    margin = AXIS_INCHES + (LEGEND_INCHES if has_legend else 0) + (ROWS_INCHES if progress else 0)
    with plotting.figure(WIDTH_INCHES, [PANEL_INCHES] * len(panels), margin, share_x=True) as (made, axes):
        for panel, each in zip(panels, axes, strict=True):
            _panel(each, panel, most)
            for step in resumes:
                style = {"color": plotting.INK, "linewidth": 0.8, "linestyle": (0, (1, 2)), "alpha": 0.6}
                each.axvline(step, label="a later start goes on", **style)
        _step_axis(axes[-1], log_x, progress)
        made.align_ylabels(axes)
        plotting.legend_above(made)
        sources = plotting.data_uris(made)
        lines = [[_line(curve, panel.label) for curve in panel.curves if _is_told(curve, panel)] for panel in panels]
        return [Figure(sources, alt, caption, hover=_hover(axes, lines, progress, log_x))]


def _is_told(curve: Curve, panel: Panel) -> bool:
    """Return True for a curve whose values are shown under the pointer: not for the faint ones of several runs."""
    return bool(len(curve.x)) and (not curve.faint or sum(each.faint for each in panel.curves) == 1)


def _line(curve: Curve, label: str) -> Line:
    points = downsample(curve.x, curve.y, HOVER_POINTS)
    return curve.label or label, plotting.line_style(curve.number)["color"], points.x, points.mean


def _hover(axes: Sequence[Any], lines: Sequence[Sequence[Line]], progress: Progress | None, log_x: bool) -> str:
    """Return what hover.js shows, as JSON. axes: of a figure that has been laid out; lines: of each."""
    steps = max((line[2] for each in lines for line in each), key=len)

    def of(each: Any, found: Sequence[Line]) -> dict[str, Any]:
        box = each.get_position()
        shown = [
            [name, colour, 0 if np.array_equal(x, steps) else x.tolist(), _short(y)] for name, colour, x, y in found
        ]
        corners = [round(side, 4) for side in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)]
        return {"box": corners, "x": list(each.get_xlim()), "lines": shown}

    found = {"log": log_x, "steps": steps.tolist(), "panels": [of(*pair) for pair in zip(axes, lines, strict=True)]}
    if progress:
        unit, size = time_unit(progress.hours[-1])
        times = np.interp(steps, progress.steps, progress.hours) / size
        found |= {"tokens": progress.tokens_per_step, "unit": unit, "times": _short(times)}
    return json.dumps(found, separators=(",", ":"))


def _short(values: Values) -> list[float | None]:
    """Five digits; None for what is no number."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def _panel(axes: Any, panel: Panel, most: int) -> None:
    values: list[float] = []
    for curve in panel.curves:
        points = downsample(curve.x, curve.y, most)
        style = plotting.line_style(curve.number)
        style |= {"alpha": 0.5, "linewidth": 0.8, "linestyle": "solid"} if curve.faint else {}
        mark = {"marker": "o", "markersize": 4} if curve.dots or np.isfinite(points.mean).sum() == 1 else {}
        axes.plot(points.x, points.mean, label=None if curve.faint else curve.label or None, **style, **mark)
        if points.averaged and (curve.faint or not any(each.faint for each in panel.curves)):
            axes.fill_between(points.x, points.low, points.high, color=style["color"], alpha=0.2, linewidth=0)
        values += points.mean.tolist()
    axes.set_ylabel(panel.label)
    if panel.log:
        plotting.logarithmic(axes, "y")
    elif panel.from_zero:
        axes.set_ylim(0, usual_top(values))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _step_axis(axes: Any, log_x: bool, progress: Progress | None = None) -> None:
    """Mark whole numbers of steps, with commas; below each its tokens and its time."""
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.xaxis.get_major_locator().set_params(nbins=8, integer=True, steps=(1, 2, 2.5, 5, 10))
    rows: dict[str, Callable[[float], str]] = {"step": lambda step: f"{step:,.0f}"}
    if progress:
        tokens, (unit, size) = progress.tokens_per_step, time_unit(progress.hours[-1])
        if tokens:
            rows["tokens"] = lambda step: large(float(f"{step * tokens:.3g}")) if step else "0"
        rows[unit] = lambda step: f"{np.interp(step, progress.steps, progress.hours) / size:,.3g}"
    axes.xaxis.set_major_formatter(
        lambda step, _: "\n".join(show(step) for show in rows.values()) if abs(step - round(step)) < 1e-6 else ""
    )  # the axis of a single step has no other whole number
    names = {"textcoords": "offset points", "xycoords": "axes fraction", "va": "top", "fontsize": 9}
    axes.annotate("\n".join(rows), (1, 0), xytext=(22, -6), **names)


def time_over_steps(history: History, progress: Progress) -> list[Figure]:
    """Seconds of a step, stacked over the steps, without the start-up; none if the log has no such times."""
    records = [record for record in settled(history) if "time_compute_s" in record]
    if len(records) < 2 or not plotting.can_draw():
        return []
    steps = [float(record["step"]) for record in records]
    columns = {
        part: downsample(steps, [number(record.get(f"time_{part}_s")) for record in records], STACK_POINTS)
        for part in TIMES
    }
    layers = {TIMES[part]: np.nan_to_num(column.mean) for part, column in columns.items() if np.nansum(column.mean)}
    x = columns["compute"].x
    with plotting.figure(WIDTH_INCHES, [2.9], 2 * LEGEND_INCHES + ROWS_INCHES) as (made, (axes,)):
        labels, colours = zip(*layers, strict=True)
        axes.stackplot(x, list(layers.values()), colors=colours, labels=labels, linewidth=0)
        axes.set_ylim(0, usual_top(np.sum(list(layers.values()), axis=0).tolist()))
        axes.set(xlim=(x[0], x[-1]), ylabel=SECONDS)
        _step_axis(axes, log_x=False, progress=progress)
        plotting.legend_above(made)
        sources = plotting.data_uris(made)
        lines = [(label, colour, x, seconds) for (label, colour), seconds in layers.items()]
        hover = _hover([axes], [lines[::-1]], progress, log_x=False)  # the topmost first
        return [Figure(sources, "where the seconds of a step go, over the steps", hover=hover)]


def time_bars(splits: Mapping[str, Mapping[str, float]], legend: bool) -> list[Figure]:
    """A bar a label of mean seconds by part."""
    return _bars("where the seconds of a step go, in the mean", splits, TIMES, SECONDS, 1.0, legend)


def memory_bars(stages: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """A bar a label of bytes by kind."""
    longest = max((sum(sizes.values()) for sizes in stages.values()), default=0.0)
    unit, size = ("GB", 1e9) if longest >= 1e9 else ("MB", 1e6)
    return _bars("memory of tensors, the most of any rank of a stage", stages, MEMORY, unit, size, legend=True)


def _bars(
    alt: str,
    bars: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, tuple[str, str]],
    unit: str,
    size: float,
    legend: bool,
) -> list[Figure]:
    """Draw a bar a name; unit: of the axis, size: in the unit of bars."""
    lengths = {part: [bar.get(part, 0.0) / size for bar in bars.values()] for part in parts}
    lengths = {part: row for part, row in lengths.items() if any(row)}
    if not lengths or not plotting.can_draw():
        return []
    margin = 0.7 + (2 * LEGEND_INCHES if legend else 0)
    with plotting.figure(WIDTH_INCHES, [BAR_INCHES * len(bars)], margin) as (made, (axes,)):
        colours = [parts[part][1] for part in lengths]
        labelled = {parts[part][0]: row for part, row in lengths.items()}
        plotting.stacked_bars(axes, list(bars), labelled, colours, numbers=True)
        axes.set_xlabel(unit)
        if legend:
            plotting.legend_above(made)
        return [Figure(plotting.data_uris(made), alt)]
