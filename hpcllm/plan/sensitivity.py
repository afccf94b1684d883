"""Predict how much a faster part of the machine or more devices would help, and how far a layout scales.

    a faster part       the layouts that were found, the best of them on the machine with that part
    more devices        a search among layouts like the best one: half its tp to twice that, its codecs, its schedule

The gain is therefore a lower bound: a search of everything may find more. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcllm.plan.layout_search import Search, search
from hpcllm.plan.machine import Machine
from hpcllm.plan.prediction import Prediction, predict

ROWS = 3  # layouts of those found that are tried with a faster part
FARTHEST = 100_000  # devices of a scaling curve
STEP = 4  # factor from one point of the curve to the next


@dataclass(frozen=True)
class Change:
    """Best layout of a changed machine."""

    change: str
    predicted: Prediction
    gain: float  # steps in the time of one of the machine as it is: 2 is twice as fast


def sensitivity(found: Search) -> tuple[Change, ...]:
    """Predict changes of the machine of a search that found something; one that lets nothing fit is left out."""
    more = _near(found, 2 * found.devices, found.global_batch, found.machine)
    memory = _doubled(found.machine, "device", ("memory_gb", "usable_memory_gib"))
    roomier = _near(found, found.devices, found.global_batch, memory)
    changes = [("twice the devices", more), ("twice the memory a device", roomier)]
    for words, machine in _faster(found.machine):
        rows = (predict(machine, found.model, row.layout, found.global_batch) for row in found.best[:ROWS])
        changes.append((words, min(rows, key=lambda row: row.iteration_time_s)))
    best_s = found.best[0].iteration_time_s
    return tuple(Change(words, one, max(1.0, best_s / one.iteration_time_s)) for words, one in changes if one)


def scaling(found: Search, batch_grows: bool) -> list[tuple[int, float]]:
    """Predict tokens/s with more and fewer devices, up to 10^5: with as many samples, or as many for each device."""
    counts = [found.devices]
    while counts[0] % STEP == 0 and counts[0] // STEP >= found.machine.device.per_node:
        counts.insert(0, counts[0] // STEP)
    while counts[-1] * STEP <= FARTHEST:
        counts.append(counts[-1] * STEP)
    points = []
    for devices in counts:
        batch, rest = divmod(found.global_batch * devices, found.devices) if batch_grows else (found.global_batch, 0)
        predicted = _near(found, devices, batch, found.machine) if batch and not rest else None
        if predicted:
            points.append((devices, predicted.tokens_per_s))
    return points


def _near(found: Search, devices: int, global_batch: int, machine: Machine) -> Prediction | None:
    """Search among layouts not far from the best one."""
    layout = found.best[0].layout
    limits = found.constraints.with_values(
        tp=[tp for tp in (layout.tp // 2, layout.tp, 2 * layout.tp) if tp],
        precision=[layout.precision],
        policy=[layout.policy],
        sequence_parallel=[layout.sequence_parallel] if layout.tp > 1 else [True, False],
        schedule=sorted({layout.schedule, "1f1b", "interleaved"}),
    )
    best = search(machine, found.model, devices, global_batch, top=1, constraints=limits).best
    return best[0] if best else None


def _faster(machine: Machine) -> list[tuple[str, Machine]]:
    """List machines with one faster part; parts whose times were measured as they are cannot be changed."""
    changes: list[tuple[str, str, tuple[str, ...]]] = []
    if machine.tuning is None:
        changes.append(("links between nodes twice as fast", "fabric", ("nic_gb_s",)))
        links = ("pair_gb_s", "package_gb_s", "device_gb_s", "collective_gb_s")
        changes.append(("links inside a node twice as fast", "links", links))
    if machine.device.measured is None:
        changes.append(("twice the FLOP/s a device", "device", ("peak_bf16_tflops", "gemm_bf16_tflops")))
        changes.append(("memory twice as fast", "device", ("hbm_gb_s",)))
    return [(words, _doubled(machine, part, keys)) for words, part, keys in changes]


def _doubled(machine: Machine, part: str, keys: Sequence[str]) -> Machine:
    old = getattr(machine, part)
    return replace(machine, **{part: replace(old, **{key: 2 * getattr(old, key) for key in keys})})
