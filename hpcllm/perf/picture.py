"""Records as curves: bandwidth over size, both logarithmic, one panel an operation, physical bounds dashed.

GB/s |   - - - - - - - - - - - -   bound of int8:256      black, grey   the MPI library
     |        .--'----------       two_step int8:256      colours       ours
     |     .-'  - - - - - - -      bound of raw           a band        the middle half of the iterations
     |   .'---------------         mpi raw                              is as wide
     +------------------- bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from hpcllm import plotting
from hpcllm.errors import ConfigError
from hpcllm.perf.records import Record, rate_text, size_text
from hpcllm.system.text import counted

BASELINES = {"mpi": "black", "native": "0.55", "memcpy": "black"}
COLOURS = [f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")]
MARKERS = "osD^vP*X<>"
DASHES = ("--", "-.", ":", (0, (8, 3)), (0, (8, 2, 1, 2, 1, 2)))
WIDTH_INCHES, PANEL_INCHES, ENTRY_INCHES = 10.0, 5.0, 0.2
DISTINCT = ("library", "ranks", "nodes", "dtype", "memory", "device", "threads")  # named where they differ
Curves = dict[str, list[Record]]


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture. Raises ConfigError if there is nothing to draw, OSError if it cannot be written."""
    if not records:
        raise ConfigError(f"nothing to draw in {str(path)!r}: there are no records")
    operations = list(dict.fromkeys(record.operation for record in records))
    groups = [[record for record in records if record.operation == operation] for operation in operations]
    heights = [max(PANEL_INCHES, ENTRY_INCHES * _legend_entries(group)) for group in groups]
    with plotting.figure(WIDTH_INCHES, heights) as (made, panels):
        for panel, group in zip(panels, groups, strict=True):
            _panel(panel, group)
        plotting.save(made, path)


def _panel(panel: Any, records: Sequence[Record]) -> None:
    differing = _differing(records)
    colours = defaultdict[tuple[str, str], str](cycle(COLOURS).__next__)  # a colour a way
    markers = defaultdict[tuple[str, ...], str](cycle(MARKERS).__next__)  # a marker a library or whatever differs
    for label, curve in _curves(records, differing).items():
        way = (curve[0].algorithm, curve[0].codec)
        colour = BASELINES.get(way[0]) or colours[way]
        marker = markers[tuple(_fact(curve[0], name) for name in differing) or way]
        x = [record.bytes for record in curve]
        panel.plot(x, [r.algbw_gb_s for r in curve], color=colour, marker=marker, markersize=4, label=label)
        panel.fill_between(x, *zip(*map(_band, curve), strict=True), color=colour, alpha=0.15, linewidth=0)
    dashes = cycle(DASHES)
    for label, points in _bounds(records).items():
        panel.plot(*zip(*points, strict=True), linestyle=next(dashes), color="0.35", linewidth=1, label=label)
    _frame(panel, records, differing)


def _differing(records: Sequence[Record]) -> list[str]:
    return [name for name in DISTINCT if len({getattr(record, name) for record in records}) > 1]


def _legend_entries(records: Sequence[Record]) -> int:
    return len(_curves(records, _differing(records))) + len(_bounds(records))


def _band(record: Record) -> tuple[float, float]:
    """GB/s of the slower and of the faster quarter, as the spread tells."""
    half_s = record.spread / 2 * record.median_s
    slow_s, fast_s = min(record.max_s, record.median_s + half_s), max(record.min_s, record.median_s - half_s)
    return record.bytes / slow_s / 1e9, record.bytes / fast_s / 1e9


def _curves(records: Sequence[Record], differing: Sequence[str]) -> Curves:
    """Label -> records by size; the library's own first, then the fastest at the largest size."""
    curves: Curves = {}
    for record in sorted(records, key=lambda record: record.bytes):
        words = [record.algorithm, record.codec, *(_fact(record, name) for name in differing)]
        curves.setdefault(" ".join(words), []).append(record)
    ours = {label: (curve[0].algorithm not in BASELINES, -curve[-1].algbw_gb_s) for label, curve in curves.items()}
    return dict(sorted(curves.items(), key=lambda item: ours[item[0]]))


def _bounds(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Label -> (bytes, GB/s) by size, one curve for each codec and link; the highest first."""
    bounds: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: record.bytes):
        if record.bound_s:
            label = f"bound of {record.codec}, link {rate_text(record.link_gb_s)} GB/s"
            bounds.setdefault(label, {})[record.bytes] = record.bytes / record.bound_s / 1e9
    highest = sorted(bounds.items(), key=lambda item: -max(item[1].values()))
    return {label: list(points.items()) for label, points in highest}


def _frame(panel: Any, records: Sequence[Record], differing: Sequence[str]) -> None:
    facts = [_fact(records[0], name) for name in ("dtype", "ranks", "nodes", "library") if name not in differing]
    panel.set_title(", ".join([records[0].operation, *facts]))
    plotting.logarithmic(panel, "x", "y")
    sizes = sorted({record.bytes for record in records})
    ticks = sizes[:: -(-len(sizes) // 12)]
    panel.set_xticks(ticks, [size_text(size) for size in ticks])
    panel.set_xticks([], minor=True)
    panel.set_xlabel("bytes of uncompressed data a rank")
    panel.set_ylabel("bytes / median time, GB/s")
    panel.grid(which="both")
    plotting.legend_beside(panel)


def _fact(record: Record, name: str) -> str:
    value = getattr(record, name)
    return counted(value, name[:-1]) if name in ("ranks", "nodes", "threads") else str(value)
