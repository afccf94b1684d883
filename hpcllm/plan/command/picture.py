"""A plan as a picture: where a step's time goes, what a device holds, how far it scales.

s  |[compute][tp][bubble][dp]      GB |----------------- usable      tokens/s |            .-'  more samples
1  |======--..                        | []                                    |        .-'_.--  as many samples
2  |=====---...                       | [] [] []                              |    .-'_.-
   +------------- layouts             +----------- stages of the first        +------------------ devices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError
from hpcllm.plan.command.report import SPLIT
from hpcllm.plan.memory.stage_memory import PARTS
from hpcllm.plan.prediction import Prediction

WIDTH_INCHES, PANEL_INCHES, BAR_INCHES = 10.0, 3.2, 0.3
MOST_WIDE = 4  # a single bar takes a fourth of the width at most
# neighbours differ in lightness, so that they differ in greyscale too
COLOURS = ("#0072b2", "#8fcbee", "#d55e00", "#f5cf73", "#009e73", "#c8c8c8")
Curve = Sequence[tuple[int, float]]  # devices, tokens/s


def draw(rows: Sequence[Prediction], curves: Mapping[str, Curve], path: Path) -> None:
    """Write the picture of layouts, the best first; curves: label -> how many tokens/s so many devices do.

    Raises ConfigError if it cannot be written.
    """
    from matplotlib.figure import Figure  # the object, not pyplot: no display, no state

    panels = 3 if curves else 2
    heights = [1.2 + BAR_INCHES * len(rows), *[PANEL_INCHES] * (panels - 1)]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False, height_ratios=heights)[:, 0]
    _times(axes[0], rows)
    _memory(axes[1], rows)
    if curves:
        _scaling(axes[2], curves)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"--plot {str(path)!r} cannot be written: {error.strerror or error}") from error


def _times(axes: Any, rows: Sequence[Prediction]) -> None:
    names = [_name(rank, row) for rank, row in enumerate(rows, 1)]
    starts = [0.0] * len(rows)
    for (words, key), colour in zip(SPLIT.items(), COLOURS, strict=True):
        seconds = [getattr(row, key) for row in rows]
        axes.barh(names, seconds, left=starts, color=colour, label=words, height=0.7)
        starts = [start + more for start, more in zip(starts, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (predicted)")
    axes.set_title(f"{rows[0].model.name} on {rows[0].layout.devices} devices of {rows[0].machine.name}", fontsize=11)
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)


def _name(rank: int, row: Prediction) -> str:
    layout = row.layout
    more = "" if layout.recompute == "none" else f" {layout.recompute}"
    return f"{rank}: {layout.tp} x {layout.pp} x {layout.dp}, {layout.schedule}{more}"


def _memory(axes: Any, rows: Sequence[Prediction]) -> None:
    """The fullest device of each layout; of one layout, each stage's."""
    if len(rows) > 1:
        bars, what = {str(rank): row.largest for rank, row in enumerate(rows, 1)}, "layouts, the fullest device of each"
    else:
        bars, what = {str(stage.stage): stage for stage in rows[0].memory}, "stages"
    feet = [0.0] * len(bars)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        sizes = [getattr(stage, part) / 1e9 for stage in bars.values()]
        axes.bar(list(bars), sizes, bottom=feet, color=colour, label=part, width=0.7)
        feet = [foot + size for foot, size in zip(feet, sizes, strict=True)]
    usable = rows[0].machine.device.usable_bytes / 1e9
    axes.axhline(usable, color="black", linestyle="--", linewidth=1, label=f"usable, {usable:.1f} GB")
    axes.set_xlim(-1, max(len(bars), MOST_WIDE))
    axes.set_xlabel(what)
    axes.set_ylabel("GB of a device")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)


def _scaling(axes: Any, curves: Mapping[str, Curve]) -> None:
    for (label, curve), marker in zip(curves.items(), "osD^v", strict=False):
        axes.plot(*zip(*curve, strict=True), marker=marker, markersize=4, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s of the best layout")
    axes.grid(True, which="both", linewidth=0.3, alpha=0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
