"""Layouts side by side, the best first: what they are, where a step's time goes, what a training costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpcllm.pipeline.table import table
from hpcllm.plan.command.facts import as_dict as prediction_dict
from hpcllm.plan.command.report import count_text, memory_table, schedule_text, verdict, wrapped
from hpcllm.plan.layouts import Layout
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.searching.reasons import bottleneck, why
from hpcllm.plan.searching.search import Search
from hpcllm.plan.searching.what_if import WhatIf, what_if
from hpcllm.plan.training import training

LAYOUT = (
    "rank",
    "tp x pp x dp",
    "micro",
    "schedule",
    "recompute",
    "shard",
    "seq.par.",
    "codecs, order",
    "GB",
    "step s",
)
SPLIT = ("rank", "step", "compute", "tp", "pp", "bubble", "dp exposed", "(hidden)", "optimizer")
COST = ("rank", "TFLOP/s model", "hardware", "MFU", "tokens/s", "days", "node-hours", "kWh (estimate)")

WORDS = {
    "predicted": "run through in full",
    "slower": "cannot be faster",
    "does not fit": "do not fit",
    "refused": "refused by the trainer",
}
MOST_REASONS = 3


def lines(found: Search, tokens: float | None) -> list[str]:
    """Of a search that found something."""
    best, usable = found.best[0], found.machine.device.usable_bytes / 1e9
    what = f"{found.model.name}, {count_text(found.model.parameters)} parameters, on {found.devices} x "
    what += f"{found.machine.device.name} of {found.machine.name}; {found.global_batch} samples of "
    what += f"{found.model.sequence} tokens a step; trainer: hpcllm"
    return [
        *wrapped(what),
        "",
        f"layouts; GB of {usable:.1f} on the fullest device, {found.headroom:.0%} left free",
        *table(LAYOUT, [_layout_row(rank, row) for rank, row in enumerate(found.best, 1)]),
        "",
        "seconds of a step",
        *table(SPLIT, [_split_row(rank, row) for rank, row in enumerate(found.best, 1)]),
        "",
        f"speed, and a training on {count_text(training(best, tokens).tokens)} tokens",
        *table(COST, [_cost_row(rank, row, tokens) for rank, row in enumerate(found.best, 1)]),
        "",
        *wrapped(f"why: {why(found)}"),
        *wrapped(f"bottleneck: {bottleneck(best)}"),
        *_changes(what_if(found)),
        *wrapped(_searched(found)),
        "",
        *memory_table(best),
        *wrapped(verdict(best)),
        *wrapped(f"the first as one layout: --layout {best.layout.text()}"),
    ]


def nothing(found: Search) -> list[str]:
    """Of a search that found nothing: by how much, and what would help."""
    asked = f"{found.model.name} on {found.devices} x {found.machine.device.name} of {found.machine.name}"
    near = found.nearest
    if near is None:
        said = f"NO LAYOUT EXISTS: {asked}, of {found.global_batch} samples and {found.model.shape.layers} layers"
        return [*wrapped(f"{said}: what --constraints leave does not divide them, or is refused"), _searched(found)]
    return [
        *wrapped(f"NOTHING FITS: {asked}, {found.headroom:.0%} of the memory left free"),
        *wrapped(f"what lacks least memory: --layout {near.layout.text()}"),
        *wrapped(verdict(near)),
        "",
        *memory_table(near),
        "",
        *wrapped(_least(found, near.layout)),
        *wrapped(_searched(found)),
    ]


def _least(found: Search, layout: Layout) -> str:
    """How many devices have room for what is kept between steps, however it is shared out."""
    each = layout.item_bytes + 4 + (8 if layout.precision == "fp32" else 12)  # weight, gradient, AdamW and master
    kept, room = each * found.model.parameters, (1 - found.headroom) * found.machine.device.usable_bytes
    return (
        f"weights, gradients and optimizer alone are {each} bytes a parameter, {kept / 1e9:,.0f} GB: at least "
        f"{math.ceil(kept / room):,} devices of {room / 1e9:.1f} GB, and activations more"
    )


def as_dict(found: Search, tokens: float | None) -> dict[str, Any]:
    """For --json."""
    changes = what_if(found) if found.best else ()
    return {
        "machine": found.machine.name,
        "model": found.model.name,
        "devices": found.devices,
        "global_batch": found.global_batch,
        "sequence_length": found.model.sequence,
        "fits": bool(found.best),
        "rows": [prediction_dict(row, tokens) | {"rank": rank} for rank, row in enumerate(found.best, 1)],
        "why": why(found) if found.best else "",
        "bottleneck": bottleneck(found.best[0]) if found.best else "",
        "what_if": [
            {"change": one.change, "gain": one.gain} | prediction_dict(one.predicted, tokens) for one in changes
        ],
        "counts": dict(found.counts),
        "refused": dict(found.refused),
        "idle_devices": found.idle,
        "headroom": found.headroom,
        "nearest": prediction_dict(found.nearest, tokens) if found.nearest else None,
    }


def _layout_row(rank: int, row: Prediction) -> list[str]:
    layout = row.layout
    return [
        str(rank),
        f"{layout.tp} x {layout.pp} x {layout.dp}",
        str(layout.micro_batch),
        schedule_text(layout),
        layout.recompute,
        layout.shard,
        "yes" if layout.sequence_parallel else "no",
        layout.policy + (f" {layout.order}" if layout.order != Layout.order else ""),
        f"{row.largest.device_bytes / 1e9:.1f}",
        f"{row.iteration_time_s:.4g}",
    ]


def _split_row(rank: int, row: Prediction) -> list[str]:
    seconds = (row.compute_s, row.tp_s, row.pp_s, row.bubble_s, row.dp_exposed_s)
    return [
        str(rank),
        f"{row.iteration_time_s:.4g}",
        *(f"{each:.3g}" for each in seconds),
        f"({row.dp_hidden_s:.3g})",
        f"{row.optimizer_s:.3g}",
    ]


def _cost_row(rank: int, row: Prediction, tokens: float | None) -> list[str]:
    cost = training(row, tokens)
    return [
        str(rank),
        f"{row.tflops_per_device_model:.3g}",
        f"{row.tflops_per_device_hardware:.3g}",
        f"{row.mfu:.1%}",
        f"{row.tokens_per_s:,.0f}",
        f"{cost.days:.3g}",
        f"{cost.node_hours:,.0f}",
        f"{cost.energy_kwh:,.0f}",
    ]


def _changes(changes: Sequence[WhatIf]) -> list[str]:
    """What would be faster, and by how much; of layouts near those that were found."""
    return wrapped("what if: " + ", ".join(f"{one.change}: {one.gain:.2f} x as fast" for one in changes))


def _searched(found: Search) -> str:
    """What became of all layouts."""
    counts = ", ".join(f"{found.counts[key]:,} {words}" for key, words in WORDS.items() if found.counts.get(key))
    reasons = sorted(found.refused.items(), key=lambda item: -item[1])[:MOST_REASONS]
    why = "".join(f"; {count} refused: {reason}" for reason, count in reasons)
    idle = f"; {found.idle} devices idle: no layout of all of them exists or fits" if found.idle else ""
    return f"searched {sum(found.counts.values()):,} layouts: {counts}{why}{idle}"
