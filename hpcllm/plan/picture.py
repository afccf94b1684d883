"""Draw a plan: how a step's time divides, what a device holds, how far it scales.

s  |[compute][tp][bubble][dp]      GB |----------------- usable      tokens/s |            .-'  more samples
1  |======--..                        | []                                    |        .-'_.--  as many samples
2  |=====---...                       | [] [] []                              |    .-'_.-
   +------------- layouts             +----------- stages of the first        +------------------ devices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcllm import plotting
from hpcllm.plan.memory.stage_memory import PARTS
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.report import STEP_PARTS
from hpcllm.system.raw_files import writing

WIDTH_INCHES, PANEL_INCHES, BAR_INCHES = 10.0, 3.2, 0.3
MOST_WIDE = 4  # a single bar takes a fourth of the width at most
Curve = Sequence[tuple[int, float]]  # devices, tokens/s


def draw(rows: Sequence[Prediction], curves: Mapping[str, Curve], path: Path) -> None:
    """Write the picture of layouts, the best first; curves: label -> how many tokens/s so many devices do.

    Raises ConfigError if it cannot be written.
    """
    heights = [1.2 + BAR_INCHES * len(rows), *[PANEL_INCHES] * (2 if curves else 1)]
    with plotting.figure(WIDTH_INCHES, heights) as (made, axes):
        _times(axes[0], rows)
        _memory(axes[1], rows)
        if curves:
            _scaling(axes[2], curves)
        for panel in axes:
            plotting.legend_beside(panel)
        with writing(f"--plot {str(path)!r}"):
            plotting.save(made, path)


def _times(axes: Any, rows: Sequence[Prediction]) -> None:
    names = []
    for rank, layout in enumerate((row.layout for row in rows), 1):
        more = "" if layout.recompute == "none" else f" {layout.recompute}"
        names.append(f"{rank}: {layout.tp} x {layout.pp} x {layout.dp}, {layout.schedule}{more}")
    parts = {name: [getattr(row, key) for row in rows] for key, (name, *_) in STEP_PARTS.items()}
    plotting.stacked_bars(axes, names, parts)
    axes.set_xlabel("seconds of a step (predicted)")
    axes.set_title(f"{rows[0].model.name} on {rows[0].layout.devices} devices of {rows[0].machine.name}")
    axes.tick_params(axis="y", labelsize=8)


def _memory(axes: Any, rows: Sequence[Prediction]) -> None:
    """The fullest device of each layout; of one layout, each stage's."""
    if len(rows) > 1:
        bars, what = {str(rank): row.largest for rank, row in enumerate(rows, 1)}, "layouts, the fullest device of each"
    else:
        bars, what = {str(stage.stage): stage for stage in rows[0].memory}, "stages"
    parts = {part: [getattr(stage, part) / 1e9 for stage in bars.values()] for part in PARTS}
    plotting.stacked_bars(axes, list(bars), parts, upright=True)
    usable = rows[0].machine.device.usable_bytes / 1e9
    axes.axhline(usable, color=plotting.INK, linestyle="--", linewidth=1, label=f"usable, {usable:.1f} GB")
    beside = max(0.5, (MOST_WIDE - len(bars)) / 2)  # bars: on both sides alike, a few of them in the middle
    axes.set_xlim(-beside - 0.25, len(bars) - 1 + beside + 0.25)
    axes.set_xlabel(what)
    axes.set_ylabel("GB of a device")


def _scaling(axes: Any, curves: Mapping[str, Curve]) -> None:
    for k, ((label, curve), marker) in enumerate(zip(curves.items(), "osD^v", strict=False)):
        axes.plot(*zip(*curve, strict=True), marker=marker, markersize=4, label=label, **plotting.line_style(k))
    plotting.logarithmic(axes, "x", "y")
    axes.set(xlabel="devices", ylabel="tokens/s of the best layout")
    axes.grid(which="both")
