"""Print the result of a search: layouts side by side, the best first, and why it is the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hpcllm.plan.cost import training_cost
from hpcllm.plan.layout_search import Search
from hpcllm.plan.layouts import Layout
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.report import (
    STEP_PARTS,
    bottleneck,
    count_text,
    memory_table,
    schedule_text,
    verdict,
    wrapped,
)
from hpcllm.plan.report import as_dict as prediction_dict
from hpcllm.plan.sensitivity import Change, sensitivity
from hpcllm.system.text import table

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
    "refused": "rejected by the trainer",
}
MOST_REASONS = 3


def lines(found: Search, tokens: float | None) -> list[str]:
    """Write the tables of a search that found something."""
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
        f"speed, and a training on {count_text(training_cost(best, tokens).tokens)} tokens",
        *table(COST, [_cost_row(rank, row, tokens) for rank, row in enumerate(found.best, 1)]),
        "",
        *wrapped(f"why: {why(found)}"),
        *wrapped(f"bottleneck: {bottleneck(best)}"),
        *_changes(sensitivity(found)),
        *wrapped(_searched(found)),
        "",
        *memory_table(best),
        *wrapped(verdict(best)),
        *wrapped(f"the first as one layout: --layout {best.layout.text()}"),
    ]


def nothing(found: Search) -> list[str]:
    """Say by how much a search that found nothing missed, and what would help."""
    requested = f"{found.model.name} on {found.devices} x {found.machine.device.name} of {found.machine.name}"
    near = found.nearest
    if near is None:
        message = (
            f"NO LAYOUT EXISTS: {requested}, of {found.global_batch} samples and {found.model.shape.layers} layers"
        )
        return [*wrapped(f"{message}: what --constraints leave does not divide them, or is rejected"), _searched(found)]
    return [
        *wrapped(f"NOTHING FITS: {requested}, {found.headroom:.0%} of the memory left free"),
        *wrapped(f"what lacks least memory: --layout {near.layout.text()}"),
        *wrapped(verdict(near)),
        "",
        *memory_table(near),
        "",
        *wrapped(_devices_needed(found, near.layout)),
        *wrapped(_searched(found)),
    ]


def _devices_needed(found: Search, layout: Layout) -> str:
    """Say how many devices have room for what is kept between steps, however it is shared out."""
    each = layout.item_bytes + 4 + (8 if layout.precision == "fp32" else 12)  # weight, gradient, AdamW and master
    kept, room = each * found.model.parameters, (1 - found.headroom) * found.machine.device.usable_bytes
    return (
        f"weights, gradients and optimizer alone are {each} bytes a parameter, {kept / 1e9:,.0f} GB: at least "
        f"{math.ceil(kept / room):,} devices of {room / 1e9:.1f} GB, and activations more"
    )


def as_dict(found: Search, tokens: float | None) -> dict[str, Any]:
    """Return the facts of --json."""
    changes = sensitivity(found) if found.best else ()
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
        "refused": dict(found.rejected),
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
    cost = training_cost(row, tokens)
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


def _changes(changes: Sequence[Change]) -> list[str]:
    """Say which changes would be faster, and by how much; of layouts near those that were found."""
    return wrapped("what if: " + ", ".join(f"{one.change}: {one.gain:.2f} x as fast" for one in changes))


def _searched(found: Search) -> str:
    """Say what became of all layouts."""
    counts = ", ".join(f"{found.counts[key]:,} {words}" for key, words in WORDS.items() if found.counts.get(key))
    reasons = sorted(found.rejected.items(), key=lambda item: -item[1])[:MOST_REASONS]
    why = "".join(f"; {count} rejected: {reason}" for reason, count in reasons)
    idle = f"; {found.idle} devices idle: no layout of all of them exists or fits" if found.idle else ""
    return f"searched {sum(found.counts.values()):,} layouts: {counts}{why}{idle}"


def why(found: Search) -> str:
    """Compare the best layout with the next one, and with the next one that cuts the model otherwise."""
    if len(found.best) < 2:
        return "no other layout that fits was found"
    best, second = found.best[:2]
    reasons = [_against(best, second, "the second")]
    others = (row for row in found.best[2:] if _mesh(row.layout) != _mesh(best.layout))
    other = next(others, None) if _mesh(second.layout) == _mesh(best.layout) else None
    if other:
        reasons.append(_against(best, other, f"rank {found.best.index(other) + 1}, the next of another tp x pp x dp"))
    return "; ".join(reasons)


def _against(best: Prediction, other: Prediction, name: str) -> str:
    gain = other.iteration_time_s / best.iteration_time_s - 1
    differs = _differences(best.layout, other.layout)
    if gain < 5e-4:
        return f"the first is as fast as {name} ({differs}) but simpler"
    part = max(STEP_PARTS, key=lambda part: getattr(other, part) - getattr(best, part))
    less_s = getattr(other, part) - getattr(best, part)
    what = STEP_PARTS[part][0]
    return f"the first is {gain:.1%} faster than {name} ({differs}), above all by {less_s:.3g} s less of {what}"


def _differences(one: Layout, other: Layout) -> str:
    """Write 'pp=8 for 4, dp=16 for 32'."""
    changed = [f.name for f in fields(Layout) if getattr(one, f.name) != getattr(other, f.name)]
    return ", ".join(f"{key}={getattr(one, key)} for {getattr(other, key)}" for key in changed)


def _mesh(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.dp
