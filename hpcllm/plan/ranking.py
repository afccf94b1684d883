"""Print the result of a search: layouts side by side, the best first, and why it is the best.

Where no layout of all devices is found, obstacles say what is in the way, and the nearest request that would have one:

    tp   divides heads, key and value heads and ffn: weights are split by whole heads
    pp   one stage a block at most
    dp   divides the batch: replicas get samples alike          tp x pp x dp = devices

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hpcllm.plan.cost import TrainingCost, training_cost
from hpcllm.plan.layout_search import HEADROOM, Search
from hpcllm.plan.layouts import Layout, nearest_multiples
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.report import (
    STEP_PARTS,
    bottleneck,
    count_text,
    interval_text,
    memory_table,
    padding,
    schedule_text,
    too_many,
    verdict,
    wrapped,
)
from hpcllm.plan.report import as_dict as prediction_dict
from hpcllm.plan.sensitivity import sensitivity
from hpcllm.system.text import table

Columns = dict[str, Callable[[Prediction, TrainingCost], str]]  # of a row of the table
LAYOUT: Columns = {
    "tp x pp x dp": lambda row, _: " x ".join(map(str, _mesh(row.layout))),
    "micro": lambda row, _: str(row.layout.micro_batch),
    "schedule": lambda row, _: schedule_text(row.layout),
    "recompute": lambda row, _: row.layout.recompute,
    "shard": lambda row, _: row.layout.shard,
    "seq.par.": lambda row, _: "yes" if row.layout.sequence_parallel else "no",
    "codecs, order": lambda row, _: row.layout.policy + f" {row.layout.order}" * (row.layout.order != Layout.order),
    "GB": lambda row, _: f"{row.largest.device_bytes / 1e9:.1f}",
    "step s": lambda row, _: f"{row.iteration_time_s:.4g}",
}
SPLIT: Columns = {
    "step": lambda row, _: f"{row.iteration_time_s:.4g}",
    "compute": lambda row, _: f"{row.compute_s:.3g}",
    "tp": lambda row, _: f"{row.tp_s:.3g}",
    "pp": lambda row, _: f"{row.pp_s:.3g}",
    "bubble": lambda row, _: f"{row.bubble_s:.3g}",
    "dp exposed": lambda row, _: f"{row.dp_exposed_s:.3g}",
    "(hidden)": lambda row, _: f"({row.dp_hidden_s:.3g})",
    "optimizer": lambda row, _: f"{row.optimizer_s:.3g}",
}
COST: Columns = {
    "TFLOP/s model": lambda row, _: f"{row.tflops_per_device_model:.3g}",
    "hardware": lambda row, _: f"{row.tflops_per_device_hardware:.3g}",
    "MFU": lambda row, _: f"{row.mfu:.1%}",
    "tokens/s": lambda row, _: f"{row.tokens_per_s:,.0f}",
    "days": lambda _, cost: f"{cost.days:.3g}",
    "node-hours": lambda _, cost: f"{cost.node_hours:,.0f}",
    "kWh (estimate)": lambda _, cost: f"{cost.energy_kwh:,.0f}",
}
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
    what = f"{found.model.name}, {count_text(found.model.parameters)} parameters{padding(found.model)}, on "
    what += f"{found.devices} x "
    what += f"{found.machine.device.name} of {found.machine.name}; {found.global_batch} samples of "
    what += f"{found.model.sequence} tokens a step; trainer: hpcllm"
    costs = [training_cost(row, tokens) for row in found.best]
    changes = ", ".join(f"{one.change}: {one.gain:.2f} x as fast" for one in sensitivity(found))

    def rows(columns: Columns) -> list[str]:
        cells = [[cell(*row) for cell in columns.values()] for row in zip(found.best, costs, strict=True)]
        return table(("rank", *columns), [[str(rank), *row] for rank, row in enumerate(cells, 1)])

    return [
        *wrapped(what, *too_many(found.machine, found.devices)),
        "",
        f"layouts; GB of {usable:.1f} on the fullest device, {HEADROOM:.0%} left free",
        *rows(LAYOUT),
        "",
        "seconds of a step",
        *rows(SPLIT),
        "",
        f"speed, and a training on {count_text(costs[0].tokens)} tokens",
        *rows(COST),
        "",
        *wrapped(f"why: {why(found)}", f"bottleneck: {bottleneck(best)}", f"what if: {changes}", _searched(found)),
        "",
        *memory_table(best),
        *wrapped(verdict(best), f"its step takes {interval_text(best)}"),
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
        reasons = obstacles(found) or ["what --constraints leave does not divide them, or is rejected"]
        return [*wrapped(f"{message}: {'; '.join(reasons)}"), *wrapped(_searched(found))]
    missed = f"NOTHING FITS: {requested}, {HEADROOM:.0%} of the memory left free"
    least = f"what lacks least memory: --layout {near.layout.text()}"
    needed = wrapped(_devices_needed(found, near.layout), _searched(found))
    return [*wrapped(missed, least, verdict(near)), "", *memory_table(near), "", *needed]


def _devices_needed(found: Search, layout: Layout) -> str:
    """Say how many devices have room for what is kept between steps, however it is shared out."""
    each = layout.item_bytes + 4 + (8 if layout.precision == "fp32" else 12)  # weight, gradient, AdamW and master
    kept, room = each * found.model.parameters, (1 - HEADROOM) * found.machine.device.usable_bytes
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
        "obstacles": obstacles(found),
        "headroom": HEADROOM,
        "nearest": prediction_dict(found.nearest, tokens) if found.nearest else None,
    }


def obstacles(found: Search) -> list[str]:
    """Say what stands in the way of a layout of all devices, a line each; [] if there is one, or nothing is known."""
    if found.best and not found.idle:
        return []
    return [*_undivided(found), *_too_many_stages(found), *_unshared(found)]


def _undivided(found: Search) -> list[str]:
    """Name the sizes that a requested tp does not divide, and the nearest tp that divides all."""
    sizes, split = found.model.split_by_tp, found.model.most_tp
    lines = []
    for tp in found.constraints.choices("tp", ()):
        if undivided := [f"{size} {name}" for name, size in sizes.items() if size % tp]:
            near = max(n for n in range(1, min(tp, split) + 1) if split % n == 0)
            lines.append(f"tp = {tp} does not divide {' and '.join(undivided)}; the nearest that does: tp = {near}")
    return lines


def _too_many_stages(found: Search) -> list[str]:
    layers = found.model.shape.layers
    wrong = [pp for pp in found.constraints.choices("pp", ()) if pp > layers]
    return [f"pp = {pp} is more stages than there are blocks; at most pp = {layers}" for pp in wrong]


def _unshared(found: Search) -> list[str]:
    """Name the batches that the replicas of all devices could share."""
    if found.best:
        meshes = [(found.best[0].layout.tp, found.best[0].layout.pp)]
    else:
        sizes = found.constraints.choices("tp", (1,)), found.constraints.choices("pp", (1,))
        meshes = [(tp, pp) for tp in sizes[0] for pp in sizes[1]]
    for tp, pp in meshes:
        dp, rest = divmod(found.devices, tp * pp)
        if dp > 1 and not rest and found.global_batch % dp:
            near = nearest_multiples(found.global_batch, dp)
            return [
                f"a batch of {found.global_batch} does not divide by the dp = {dp} of {found.devices} devices with "
                f"tp = {tp}, pp = {pp}; the nearest that do: {near}"
            ]
    return []


def _searched(found: Search) -> str:
    """Say what became of all layouts."""
    counts = ", ".join(f"{found.counts[key]:,} {words}" for key, words in WORDS.items() if found.counts.get(key))
    reasons = sorted(found.rejected.items(), key=lambda item: -item[1])[:MOST_REASONS]
    why = "".join(f"; {count} rejected: {reason}" for reason, count in reasons)
    idle = f"; {found.idle} devices idle: no layout of all of them exists or fits" if found.idle else ""
    in_the_way = "".join(f"; {reason}" for reason in obstacles(found)) if found.best else ""
    return f"searched {sum(found.counts.values()):,} layouts: {counts}{why}{idle}{in_the_way}"


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
    pairs = {f.name: (getattr(best.layout, f.name), getattr(other.layout, f.name)) for f in fields(Layout)}
    differs = ", ".join(f"{key}={mine} for {theirs}" for key, (mine, theirs) in pairs.items() if mine != theirs)
    if gain < 5e-4:
        return f"the first is as fast as {name} ({differs}) but simpler"
    less_s, part = max((getattr(other, part) - getattr(best, part), part) for part in STEP_PARTS)
    what = STEP_PARTS[part][1]
    return f"the first is {gain:.1%} faster than {name} ({differs}), above all by {less_s:.3g} s less of {what}"


def _mesh(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.dp
