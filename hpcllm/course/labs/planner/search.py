"""Law of the best layout: as good as all layouts tried out, by the student's own time and memory.

random small machine --> every layout that divides it --> those whose memory is enough --> the shortest step
best_layout          --> a Layout of all devices, that divides, fits, and takes no longer; None if none fits
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.planner import ours
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.course.labs.planner.laws import draw_machine, draw_model

NARROW = tuple(each.name for each in reversed(fields(Layout)))  # most easily forgotten first
CARELESS = ("micro_batch", "recompute", "shard", "heads", "layers", "devices", "memory", "activations", "powers")
MOST_DRAWS = 300  # until a case tells
CLEARLY = 1e-3  # relative
Found = tuple[Layout, float, float]  # a layout, its seconds and its bytes


def cases(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield machines in which a careless search finds something else, one for each way of being careless."""
    yield {"devices": 4, "batch": 8, "share": 1.0, "latency": 0, "seed": drawn.getrandbits(32)}
    for careless in CARELESS:
        yield next((case for case in (draw(drawn) for _ in range(MOST_DRAWS)) if tells(case, careless)), draw(drawn))
    yield {**draw(drawn), "share": -1.0}  # too little memory for any


def draw(drawn: random.Random) -> dict[str, Any]:
    """Draw devices, a batch, and which share of the range of layouts' memory there is."""
    devices, batch = drawn.choice(((6, 24), (6, 16), (8, 16), (8, 24), (12, 24), (12, 16)))
    share, latency = drawn.choice((0.01, 0.03, 0.1, 0.3)), drawn.choice((0, 0, 0, 1, 2, 3))
    return {"devices": devices, "batch": batch, "share": share, "latency": latency, "seed": drawn.getrandbits(32)}


def machine_of(case: Mapping[str, Any]) -> tuple[Model, Machine]:
    """Draw the model and the machine of a case; memory by our own formula."""
    drawn = random.Random(case["seed"])
    model = draw_model(drawn, drawn.choice((4, 6, 8)))
    if drawn.random() < 0.5:  # tp = 3 divides it, too
        model = replace(
            model, heads=12, hidden=96 * drawn.randrange(1, 5), ffn=3 * model.ffn, vocabulary=3 * model.vocabulary
        )
    machine = draw_machine(drawn, drawn.choice((2, 4, 16)))
    sizes = [memory(model, each, case["batch"]) for each in ours.layouts(model, case["devices"], case["batch"])]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    enough = least + case["share"] * (most - least) if case["share"] > 0 else least / 2
    latency_s, near = (
        machine.latency_s * 10.0 ** (case["latency"] - 2),
        machine.near_bytes_per_s * drawn.choice((1, 100)),
    )
    return model, replace(machine, memory_bytes=enough, latency_s=latency_s, near_bytes_per_s=near)


def memory(model: Model, layout: Layout, batch: int, without: str = "") -> float:
    """Return the bytes of all kinds but one."""
    return sum(size for kind, size in ours.memory_bytes(model, layout, batch).items() if kind != without)


def tells(case: Mapping[str, Any], careless: str) -> bool:
    """Return True if a search that is careless in this way finds none, a slower one, or one that cannot be."""
    (model, machine), batch, devices = machine_of(case), case["batch"], case["devices"]
    best = ours.best_layout(model, machine, devices, batch)
    if best is None:
        return False
    part = careless if careless in ("heads", "layers", "devices") else ""
    limit = machine.memory_bytes if careless != "memory" else float("inf")
    without = "activations" if careless == "activations" else ""
    there = [each for each in ours.layouts(model, devices, batch, part) if memory(model, each, batch, without) <= limit]
    if careless == "powers":
        there = [each for each in there if each.tp & (each.tp - 1) == 0]
    if careless in NARROW:
        there = [each for each in there if getattr(each, careless) == getattr(Layout(), careless)]
    fastest_s = min((ours.step_seconds(model, each, machine, batch) for each in there), default=float("inf"))
    return abs(fastest_s / ours.step_seconds(model, best, machine, batch) - 1) > CLEARLY


def check_best(trial: Trial) -> None:
    """Compare the student's layout with all others."""
    devices, batch = trial.case["devices"], trial.case["batch"]
    model, machine = machine_of(trial.case)
    there = every(trial.student, model, machine, devices, batch)
    found = trial.student.best_layout(model, machine, devices, batch)
    given = f"{devices} devices of {machine.memory_bytes:.4g} bytes, {machine.node} a node"
    said = f"{given}, batch = {batch}, {model}: {found}"
    enough = [row for row in there if row[2] <= machine.memory_bytes]
    if found is None and enough:
        raise LawError("none_found", f"{said}, but {enough[0][0]} needs {enough[0][2]:.4g} bytes")
    if found is not None:
        judge(trial, found, (model, machine, devices, batch), enough, said)


def every(student: Any, model: Model, machine: Machine, devices: int, batch: int) -> list[Found]:
    """List every layout with the seconds and bytes that the student's functions give."""
    found = []
    for layout in ours.layouts(model, devices, batch):
        seconds = float(student.step_seconds(model, layout, machine, batch))
        found.append((layout, seconds, float(sum(student.memory_bytes(model, layout, batch).values()))))
    return found


def judge(trial: Trial, found: Any, case: tuple[Model, Machine, int, int], enough: Sequence[Found], said: str) -> None:
    """Check one layout. Raises LawError."""
    model, machine, devices, batch = case
    if not isinstance(found, Layout):
        raise LawError("no_layout", said)
    if found.dp * found.tp * found.pp != devices:
        raise LawError("devices", said)
    if not all(ours.divides(model, found, batch).values()):
        raise LawError("divides", said)
    bytes_now = sum(trial.student.memory_bytes(model, found, batch).values())
    if bytes_now > machine.memory_bytes:
        raise LawError("too_large", f"{said} needs {bytes_now:.4g} bytes")
    seconds = float(trial.student.step_seconds(model, found, machine, batch))
    best = min(enough, key=lambda row: row[1])
    if seconds > best[1] * (1 + ours.NEAR):
        name = next((name for name in NARROW if best_with(name, found, enough) >= seconds * (1 - ours.NEAR)), "")
        alike = f", the best of those with {name} = {getattr(found, name)}" if name else ""
        raise LawError(
            "not_tried" if name else "not_best", f"{said}: {seconds:.6g} s{alike}; {best[0]}: {best[1]:.6g} s"
        )


def best_with(name: str, found: Layout, enough: Sequence[Found]) -> float:
    """Return the seconds of the best layout that is like this one in one of its numbers."""
    return min(seconds for layout, seconds, _ in enough if getattr(layout, name) == getattr(found, name))
