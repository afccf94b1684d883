"""Why a layout is as fast as it is, and why it wins: sentences about the parts of a step. Pure."""

from __future__ import annotations

from dataclasses import fields

from hpcllm.plan.layouts import Layout
from hpcllm.plan.prediction import Prediction
from hpcllm.plan.searching.search import Search

# part of a step -> what it is, what would make it less
PARTS = {
    "compute_s": ("work of the devices", "less recomputation, larger microbatches, faster devices"),
    "tp_s": ("messages inside layers (tp)", "less tp, or tp within the fastest links, sequence_parallel"),
    "pp_s": ("waiting for messages between stages", "fewer stages, smaller microbatches, a codec"),
    "bubble_s": ("waiting for other stages", "more samples a step, fewer stages, smaller microbatches, zb-v or chunks"),
    "dp_exposed_s": ("sums of gradients and weights over replicas", "more samples a step, fewer replicas, a codec"),
    "optimizer_s": ("the optimizer's update", "shard=states, more tp or pp"),
}


def bottleneck(found: Prediction) -> str:
    """What most of a step goes to besides work that has to be done, and what would make it less."""
    seconds = {part: getattr(found, part) for part in PARTS}
    waits = max((part for part in PARTS if part != "compute_s"), key=lambda part: seconds[part])
    share = found.compute_s / found.iteration_time_s
    told = f"{share:.0%} of a step is work of the devices, at {found.tflops_per_device_hardware:.3g} TFLOP/s over all"
    if seconds[waits] < 0.02 * found.iteration_time_s:
        return f"{told}; nothing else takes 2 %: only {PARTS['compute_s'][1]} would help"
    what, cure = PARTS[waits]
    return (
        f"{told}; most of the rest is {what}, {seconds[waits]:.3g} s or {seconds[waits] / found.iteration_time_s:.0%}; "
        f"less with {cure}"
    )


def why(found: Search) -> str:
    """What the best layout has ahead of the next one, and of the next one that cuts the model otherwise."""
    if len(found.best) < 2:
        return "no other layout that fits was found"
    best, second = found.best[:2]
    told = [_against(best, second, "the second")]
    others = (row for row in found.best[2:] if _mesh(row.layout) != _mesh(best.layout))
    other = next(others, None) if _mesh(second.layout) == _mesh(best.layout) else None
    if other:
        told.append(_against(best, other, f"rank {found.best.index(other) + 1}, the next of another tp x pp x dp"))
    return "; ".join(told)


def _against(best: Prediction, other: Prediction, name: str) -> str:
    gain = other.iteration_time_s / best.iteration_time_s - 1
    differs = _differences(best.layout, other.layout)
    if gain < 5e-4:
        return f"the first is as fast as {name} ({differs}) but simpler"
    part = max(PARTS, key=lambda part: getattr(other, part) - getattr(best, part))
    less_s = getattr(other, part) - getattr(best, part)
    return (
        f"the first is {gain:.1%} faster than {name} ({differs}), above all by {less_s:.3g} s less of {PARTS[part][0]}"
    )


def _differences(one: Layout, other: Layout) -> str:
    """'pp=8 for 4, dp=16 for 32'."""
    changed = [f.name for f in fields(Layout) if getattr(one, f.name) != getattr(other, f.name)]
    return ", ".join(f"{key}={getattr(one, key)} for {getattr(other, key)}" for key in changed)


def _mesh(layout: Layout) -> tuple[int, int, int]:
    return layout.tp, layout.pp, layout.dp
