"""Reasons why a search finds no layout of all devices, and the nearest request that would have one. Pure.

tp   divides heads, key and value heads and ffn: weights are split by whole heads
pp   one stage a block at most
dp   divides the batch: replicas get samples alike          tp x pp x dp = devices
"""

from __future__ import annotations

import math

from hpcllm.plan.layout_search import Search
from hpcllm.plan.layouts import nearest_multiples


def obstacles(found: Search) -> list[str]:
    """Say what stands in the way of a layout of all devices, a line each; [] if there is one, or nothing is known."""
    if found.best and not found.idle:
        return []
    return [*_tensor(found), *_stages(found), *_batch(found)]


def _tensor(found: Search) -> list[str]:
    """Name the sizes that a requested tp does not divide, and the nearest tp that divides all."""
    shape = found.model.shape
    sizes = {"heads": shape.heads, "key and value heads": shape.key_value_heads, "ffn channels": shape.ffn}
    split = math.gcd(*sizes.values())
    lines = []
    for tp in found.constraints.choices("tp", ()):
        if undivided := [f"{size} {name}" for name, size in sizes.items() if size % tp]:
            near = max(n for n in range(1, min(tp, split) + 1) if split % n == 0)
            lines.append(f"tp = {tp} does not divide {' and '.join(undivided)}; the nearest that does: tp = {near}")
    return lines


def _stages(found: Search) -> list[str]:
    layers = found.model.shape.layers
    wrong = [pp for pp in found.constraints.choices("pp", ()) if pp > layers]
    return [f"pp = {pp} is more stages than there are blocks; at most pp = {layers}" for pp in wrong]


def _batch(found: Search) -> list[str]:
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
