"""Laws of lab 8: sizes and FLOPs as our models have them, memory as our planner counts it, times by formula.

a case's seed --> random model, layout, machine, batch --> the student's number beside ours --> mistakes.py names which
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hpcllm.config.schema import ModelConfig
from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.planner import mistakes, ours
from hpcllm.course.labs.planner.given import Layout, Machine, Model
from hpcllm.course.labs.planner.mistakes import is_near, likely
from hpcllm.model.shapes import cut_layers, flops_per_token, parameter_count, split_sizes
from hpcllm.plan.layouts import Layout as PlanLayout
from hpcllm.plan.memory.megatron import layer_kept, state_bytes
from hpcllm.plan.memory.sizes import layout_sizes
from hpcllm.plan.models import Model as PlanModel

ACTIVATIONS_NEAR = 0.05  # relative; attention keeps a sum of each query, too
SIZES: Mapping[str, dict[str, int]] = {  # small ones first
    "one device": {},
    "replicas": {"dp": 4},
    "split layers": {"tp": 4},
    "stages": {"pp": 4},
    "all": {"dp": 4, "tp": 2, "pp": 4},
}
PARTS: Mapping[str, tuple[int, ...]] = {  # devices of a node in each case: where rings stay in one, and where not
    "one device": (4, 4),
    "replicas": (4, 4, 2),
    "split layers": (4, 4, 2),
    "stages": (4, 4, 2, 4),
    "all": (8, 8, 4, 4, 2, 16, 4, 1),
}
FASTER = ("peak_flops_per_s", "efficiency", "near_bytes_per_s", "far_bits_per_s")


def config_of(model: Model) -> ModelConfig:
    """Make the same model ours."""
    return ModelConfig(
        layers=model.layers, hidden=model.hidden, heads=model.heads, ffn=model.ffn, vocabulary=model.vocabulary,
        max_sequence=model.sequence, activation="swiglu" if model.gated else "gelu", tied=False,
    )  # fmt: skip


def draw_model(drawn: random.Random, layers: int) -> Model:
    """Draw a model that 1, 2 and 4 divide."""
    heads = 4 * drawn.randrange(1, 5)
    hidden = heads * 8 * drawn.randrange(2, 9)
    ffn, vocabulary = 4 * drawn.randrange(hidden // 4, hidden), 4 * drawn.randrange(50, 900)
    return Model(layers, hidden, heads, ffn, vocabulary, 8 * drawn.randrange(5, 60), drawn.random() < 0.5)


def draw_machine(drawn: random.Random, node: int) -> Machine:
    """Draw a machine on which no part of a step is lost beside the others."""
    latency_s, near, far = drawn.uniform(1e-4, 1e-3), drawn.uniform(1e9, 5e9), drawn.uniform(1e9, 4e9)
    return Machine(drawn.uniform(1e12, 4e12), drawn.uniform(0.3, 0.7), 4e10, node, latency_s, near, far)


def model_cases(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield seeds of models, some without a gate and some with one."""
    for gated in (False, True, False, True):
        yield {"gated": gated, "seed": drawn.getrandbits(32)}


def model_of(trial: Trial) -> Model:
    """Draw the model of a case."""
    drawn = random.Random(trial.case["seed"])
    return replace(draw_model(drawn, drawn.randrange(2, 9)), gated=trial.case["gated"])


def check_sizes(trial: Trial) -> None:
    """Compare parameters with those of our decoder."""
    model = model_of(trial)
    found, wanted = float(trial.student.parameters(model)), parameter_count(config_of(model))
    if not is_near(found, wanted, 0):
        key = likely(found, lambda rules: ours.parameters(model, rules), mistakes.SIZES)
        raise LawError(key, f"parameters({model}) = {found:.12g}, not {wanted}")


def check_flops(trial: Trial) -> None:
    """Compare FLOPs with those that our trainer counts."""
    model = model_of(trial)
    tokens = 3 * model.sequence
    found, wanted = (
        float(trial.student.flops(model, tokens)),
        tokens * flops_per_token(config_of(model), model.sequence),
    )
    if not is_near(found, wanted, 1e-12):
        key = likely(found, lambda rules: ours.flops(model, tokens, rules), mistakes.FLOPS)
        raise LawError(key, f"flops({model}, {tokens}) = {found:.12g}, not {wanted:.12g}")


def layout_cases(drawn: random.Random, _: int) -> Iterator[Mapping[str, Any]]:
    """Yield parts of a layout, with and without recomputation, in a node and over several; seeds of the rest."""
    for part, nodes in PARTS.items():
        for number, node in enumerate(nodes):
            yield {"part": part, "recompute": number % 2 > 0, "node": node, "seed": drawn.getrandbits(32)}


def memory_cases(drawn: random.Random, ranks: int) -> Iterator[Mapping[str, Any]]:
    """Yield them with replicas first, in which a microbatch, a replica's samples and a batch can be told apart."""
    yield from sorted(layout_cases(drawn, ranks), key=lambda case: case["part"] != "replicas")


def step_of(trial: Trial) -> tuple[Model, Layout, Machine, int]:
    """Draw the model, layout, machine and batch of a case: several microbatches, fewer or more than stages."""
    drawn, case = random.Random(trial.case["seed"]), trial.case
    sizes, recompute = SIZES[case["part"]], case["recompute"]
    layout = Layout(**sizes, micro_batch=drawn.choice((2, 3, 5)), recompute=recompute, shard=drawn.random() < 0.5)
    model = draw_model(drawn, sizes.get("pp", 1) * drawn.randrange(2, 5))
    batch = layout.dp * layout.micro_batch * drawn.choice((3, 7, 11))
    return model, layout, draw_machine(drawn, case["node"]), batch


def check_memory(trial: Trial) -> None:
    """Compare bytes, kind by kind, with those of our models and our planner."""
    model, layout, _, batch = step_of(trial)
    found, wanted = memory_of(trial.student, model, layout, batch), planned_memory(model, layout, batch)
    for kind in ours.KINDS:
        near = ACTIVATIONS_NEAR if kind == "activations" else ours.NEAR
        if not is_near(found[kind], wanted[kind], near):
            key = memory_mistake(found[kind], kind, model, layout, batch)
            said = f"{kind} of {layout}, batch = {batch}: {found[kind]:.10g} bytes, not {wanted[kind]:.10g}"
            raise LawError(key, f"{said}; {model}")


def memory_mistake(found: float, kind: str, model: Model, layout: Layout, batch: int) -> str:
    """Return the key of the mistake that gives so many bytes of a kind."""
    known = [mistakes.ACTIVATIONS] if kind == "activations" else [mistakes.WEIGHTS, mistakes.STATES, mistakes.SIZES]
    nears = (ours.NEAR, ACTIVATIONS_NEAR / 4) if kind == "activations" else (ours.NEAR,)
    formula = partial(_bytes_by, kind, model, layout, batch)
    return next((key for near in nears if (key := likely(found, formula, *known, near=near)) != "other"), "other")


def _bytes_by(kind: str, model: Model, layout: Layout, batch: int, rules: ours.Rules) -> float:
    return ours.memory_bytes(model, layout, batch, rules)[kind]


def memory_of(student: Any, model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Return the bytes that the student's function gives. Raises LawError if it gives something else."""
    found = student.memory_bytes(model, layout, batch)
    if not isinstance(found, dict) or set(found) != set(ours.KINDS):
        raise LawError("kinds", f"memory_bytes returns {found!r:.100}, not a dict of {', '.join(ours.KINDS)}")
    return {kind: float(value) for kind, value in found.items()}


def planned_memory(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Count the bytes of the first stage by hpcllm.model and hpcllm.plan."""
    config = config_of(model)
    n = sum(split_sizes(config, cut_layers([model.layers // layout.pp] * layout.pp)[:1], layout.tp).values())
    plan = PlanLayout(tp=layout.tp, micro_batch=layout.micro_batch, precision="fp16")
    weights, gradients, states = state_bytes(config, plan)
    sizes = layout_sizes(PlanModel("drawn", config, model.sequence), plan)
    held = ours.held_microbatches(layout, batch) * model.layers // layout.pp
    layer = layer_kept(sizes, plan)
    kept = held * layer_kept(sizes, replace(plan, recompute="full")) + layer if layout.recompute else held * layer
    of_states = states * n / (layout.dp if layout.shard else 1)
    return dict(zip(ours.KINDS, (weights * n, gradients * n, of_states, kept), strict=True))


def check_time(trial: Trial) -> None:
    """Compare the seconds of a step with those of work, sums, bubble."""
    case = step_of(trial)
    found, wanted = float(trial.student.step_seconds(*case)), ours.step_seconds(*case)
    if not is_near(found, wanted):
        key = likely(found, lambda rules: ours.step_seconds(*case, rules), mistakes.TIME)
        said = ", ".join(map(str, case))
        raise LawError(key, f"{trial.case['part']}: {found:.8g} s, not {wanted:.8g} s: {said} (batch)")


def check_never_worse(trial: Trial) -> None:
    """Compare a step with that of faster devices and links, and memory with that of more sharding."""
    student, (model, layout, machine, batch) = trial.student, step_of(trial)
    usual = float(student.step_seconds(model, layout, machine, batch))
    for name in FASTER:
        faster = replace(machine, **{name: 1.3 * getattr(machine, name)})
        seconds = float(student.step_seconds(model, layout, faster, batch))
        if not 0 < seconds <= usual * (1 + ours.NEAR):
            raise LawError("slower", f"{layout}: {usual:.6g} s, and with {name} of 1.3 times as much {seconds:.6g} s")
    more = [replace(layout, shard=True), replace(layout, pp=2 * layout.pp)]
    more += [replace(layout, tp=2 * layout.tp)] if layout.tp < 4 else []
    wider = replace(model, layers=2 * model.layers)
    total = sum(memory_of(student, wider, layout, batch).values())
    for each in more:
        bytes_now = sum(memory_of(student, wider, each, batch).values())
        if not 0 < bytes_now <= total * (1 + ours.NEAR):
            raise LawError("more_memory", f"{layout}: {total:.6g} bytes, {each}: {bytes_now:.6g} bytes")


def check_efficiency(trial: Trial) -> None:
    """Put the efficiency that the student finds into the student's own formula: the seconds come back."""
    student, (model, layout, machine, batch) = trial.student, step_of(trial)
    seconds = float(student.step_seconds(model, layout, machine, batch))
    unknown = replace(machine, efficiency=1.0)
    found = float(student.sustained_efficiency(model, layout, unknown, batch, seconds))
    if not is_near(found, machine.efficiency, ours.NEAR):
        said = f"{layout}, batch = {batch}: {seconds:.6g} s are {machine.efficiency:.6g} of the peak, not {found:.6g}"
        share = work_s(model, layout, unknown, batch) / seconds
        raise LawError(efficiency_mistake(found, machine.efficiency, share), said)


def efficiency_mistake(found: float, wanted: float, share: float) -> str:
    """Return the key of a mistake. share: the step's work at the peak, over its seconds."""
    if is_near(found, share) or is_near(found, 0.75 * share):  # with what is recomputed, and without
        return "share_of_peak"
    return "upside_down" if is_near(found, 1 / wanted) else "efficiency_off"


def work_s(model: Model, layout: Layout, machine: Machine, batch: int) -> float:
    """Return the seconds of the work alone at the peak."""
    devices = layout.dp * layout.tp * layout.pp
    again = 4 / 3 if layout.recompute else 1.0
    return again * ours.flops(model, batch * model.sequence) / (devices * machine.peak_flops_per_s)
