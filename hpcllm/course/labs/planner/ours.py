"""The formulas of lab 8, with each of their numbers as data, so that a mistake is a number, too. Pure.

Rules() --> parameters, flops, memory_bytes, step_seconds        as they should be
Rules(passes=1) --> the same of a file that forgets the backward pass; mistakes.py has them by the key of their hint
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from hpcllm.course.labs.planner.given import Layout, Machine, Model

KINDS = ("parameters", "gradients", "states", "activations")
NEAR = 1e-6  # relative: rounding of another order of products


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Numbers of the formulas, and choices that can go wrong."""

    # parameters
    tables: float = 2  # of vocabulary x hidden
    norms: float = 1
    square: float = 4  # matrices of hidden x hidden in attention
    plain: float = 2  # matrices of the feed-forward network
    gated: float = 3
    # FLOPs
    per_weight: float = 2  # in a forward pass
    scores: float = 4  # for each token and channel, in a forward pass
    passes: float = 3  # forward, and backward twice as long
    products: float = 1  # tables that a token is multiplied with
    norm_products: float = 0
    # memory
    bytes_each: tuple[float, float, float] = (2, 2, 12)  # of a parameter's weight, gradient, states
    tables_by_tp: bool = True
    norms_by_tp: bool = False
    layers_by_pp: bool = True
    first_has_head: bool = False  # of several stages
    states_by_tp: bool = True
    shard: bool | None = None  # None: as the layout says
    streams: float = 4  # tensors of a layer that are whole on each rank of tp
    streams_by_tp: bool = False
    heads_kept: float = 4  # tensors of a layer that are split like the heads
    kept_by_tp: bool = True
    plain_kept: float = 2  # tensors of the feed-forward network
    gated_kept: float = 4
    held: str = "1f1b"
    samples: str = "micro_batch"
    keeps_all: bool = False  # in spite of recomputation
    layer_at_work: bool = True
    activation_bytes: float = 2
    # time
    again: float = 1  # forward passes more, with recomputation
    efficiency: bool = True
    work_by: str = "dp tp pp"
    step_samples: str = "batch"
    bubble: str = "(p - 1) / m"
    microbatches: str = "of a replica"
    bubble_waits: bool = True  # for traffic over tp as well
    sums: float = 2  # over tp of a layer, in a forward pass
    backward_sums: bool = True
    again_sums: bool = True
    tp_layers: bool = True  # of a stage alone
    tp_microbatches: bool = True  # all of them, not one
    ring: str = "2 (p - 1) / p"
    messages: str = "2 (p - 1)"
    far_bits: float = 8  # of a byte
    near_bits: float = 1
    links: str = "by ranks"
    gradient_part: str = "of a device"
    gradient_bytes: float = 2


RIGHT = Rules()


def layer_matrices(model: Model, r: Rules = RIGHT) -> float:
    """Return the weights of one layer's matrices."""
    inner = (r.gated if model.gated else r.plain) * model.hidden * model.ffn
    return r.square * model.hidden * model.hidden + inner


def parameters(model: Model, r: Rules = RIGHT) -> float:
    """Return all parameters."""
    layers = model.layers * (layer_matrices(model, r) + 2 * r.norms * model.hidden)
    return layers + r.tables * model.vocabulary * model.hidden + r.norms * model.hidden


def flops(model: Model, tokens: float, r: Rules = RIGHT) -> float:
    """Return the FLOPs of the forward and backward pass of so many tokens, nothing recomputed."""
    weights = model.layers * layer_matrices(model, r) + r.products * model.vocabulary * model.hidden
    weights += r.norm_products * (2 * model.layers + 1) * model.hidden
    scores = r.scores * model.layers * model.hidden * model.sequence
    return tokens * r.passes * (r.per_weight * weights + scores)


def device_parameters(model: Model, layout: Layout, r: Rules = RIGHT) -> float:
    """Return the parameters that a device of the first stage has."""
    norm = r.norms * model.hidden / (layout.tp if r.norms_by_tp else 1)
    layers = model.layers / (layout.pp if r.layers_by_pp else 1)
    table = model.vocabulary * model.hidden / (layout.tp if r.tables_by_tp else 1)
    has_head = layout.pp == 1 or r.first_has_head
    ends = (r.tables - 1) * table + norm if has_head else 0
    return layers * (layer_matrices(model, r) / layout.tp + 2 * norm) + table + ends


def microbatches(layout: Layout, batch: int) -> int:
    """Return the microbatches of a replica in a step."""
    return batch // (layout.dp * layout.micro_batch)


def held_microbatches(layout: Layout, batch: int, r: Rules = RIGHT) -> int:
    """Return the microbatches whose activations the first stage holds at once."""
    m = microbatches(layout, batch)
    return {"1f1b": min(layout.pp, m), "one": 1, "all": m, "stages": layout.pp}[r.held]


def activation_bytes(model: Model, layout: Layout, batch: int, r: Rules = RIGHT) -> float:
    """Return the bytes of activations at their peak, without the loss's."""
    samples = {"micro_batch": layout.micro_batch, "batch": batch, "one": 1}[r.samples]
    tokens, tp = samples * model.sequence, layout.tp if r.kept_by_tp else 1
    stream = r.activation_bytes * tokens * model.hidden
    inner = r.heads_kept * model.hidden + (r.gated_kept if model.gated else r.plain_kept) * model.ffn
    layer = r.streams * stream / (tp if r.streams_by_tp else 1) + r.activation_bytes * tokens * inner / tp
    kept = held_microbatches(layout, batch, r) * model.layers / (layout.pp if r.layers_by_pp else 1)
    if layout.recompute and not r.keeps_all:
        return kept * stream + r.layer_at_work * layer
    return kept * layer


def memory_bytes(model: Model, layout: Layout, batch: int, r: Rules = RIGHT) -> dict[str, float]:
    """Return the bytes that a device of the first stage needs, by what they are for."""
    n = device_parameters(model, layout, r)
    weights, gradients, states = r.bytes_each
    shard = layout.shard if r.shard is None else r.shard
    of_states = states * n / (layout.dp if shard else 1) * (1 if r.states_by_tp else layout.tp)
    found = weights * n, gradients * n, of_states, activation_bytes(model, layout, batch, r)
    return dict(zip(KINDS, found, strict=True))


def step_seconds(model: Model, layout: Layout, machine: Machine, batch: int, r: Rules = RIGHT) -> float:
    """Return the seconds of a step: work, sums over tp, bubble, sum of gradients over dp."""
    m = microbatches(layout, batch)
    devices = {"dp tp pp": layout.dp * layout.tp * layout.pp, "tp pp": layout.tp * layout.pp, "dp": layout.dp}
    samples = {"batch": batch, "micro_batch": layout.micro_batch, "twice": layout.dp * batch}[r.step_samples]
    again = r.again if layout.recompute else 0
    rate = machine.peak_flops_per_s * (machine.efficiency if r.efficiency else 1) * devices[r.work_by]
    work = flops(model, samples * model.sequence, r) * (1 + again / 3) / rate
    travel = tp_seconds(model, layout, machine, m, r)
    counted = {"of a replica": m, "of all": m * layout.dp, "samples": m * layout.micro_batch}[r.microbatches]
    waiting = work + travel if r.bubble_waits else work
    bubble = waiting * bubble_share(layout.pp, counted, r)
    return work + travel + bubble + dp_seconds(model, layout, machine, r)


def bubble_share(p: int, m: int, r: Rules = RIGHT) -> float:
    """Return the time in which a device idles, over that in which it works."""
    shares = {"(p - 1) / m": (p - 1) / m, "(p - 1) / (m + p - 1)": (p - 1) / (m + p - 1), "p / m": p / m}
    return {**shares, "none": 0.0, "2 (p - 1) / m": 2 * (p - 1) / m}[r.bubble] if p > 1 else 0.0


def tp_seconds(model: Model, layout: Layout, machine: Machine, m: int, r: Rules = RIGHT) -> float:
    """Return the seconds in which a device of a stage sums activations over tp."""
    passes = 1 + r.backward_sums + (layout.recompute and r.again_sums)
    size = r.activation_bytes * layout.micro_batch * model.sequence * model.hidden
    layers = model.layers / (layout.pp if r.tp_layers else 1)
    times = layers * r.sums * passes * (m if r.tp_microbatches else 1)
    return times * ring_seconds(layout.tp, layout.tp, size, machine, r)


def dp_seconds(model: Model, layout: Layout, machine: Machine, r: Rules = RIGHT) -> float:
    """Return the seconds of the sum of gradients over dp."""
    n = device_parameters(model, layout, r) if r.gradient_part == "of a device" else parameters(model, r)
    n = n * layout.tp if r.gradient_part == "of a stage" else n
    ranks = layout.dp if r.links == "by dp" else layout.dp * layout.tp
    return ring_seconds(layout.dp, ranks, r.gradient_bytes * n, machine, r)


def ring_seconds(p: int, ranks: int, size_bytes: float, machine: Machine, r: Rules = RIGHT) -> float:
    """Return the seconds of a ring over p devices, among `ranks` that follow one another."""
    factors = {"2 (p - 1) / p": 2 * (p - 1) / p, "(p - 1) / p": (p - 1) / p, "2 (p - 1)": 2 * (p - 1.0)}
    factor = {**factors, "1": 1.0 * (p > 1), "2": 2.0 * (p > 1)}[r.ring]
    messages = {"2 (p - 1)": 2 * (p - 1), "p - 1": p - 1, "1": min(1, p - 1), "0": 0}[r.messages]
    near, far = machine.near_bytes_per_s / r.near_bits, machine.far_bits_per_s / r.far_bits
    is_near = {"near": True, "far": False}.get(r.links, ranks <= machine.node)
    return messages * machine.latency_s + factor * size_bytes / (near if is_near else far)


def divides(model: Model, layout: Layout, batch: int) -> dict[str, bool]:
    """Return which of these a layout divides."""
    by_tp = (model.heads, model.ffn, model.vocabulary)
    return {
        "heads": all(whole % layout.tp == 0 for whole in by_tp),
        "layers": model.layers % layout.pp == 0,
        "batch": batch % (layout.dp * layout.micro_batch) == 0,
    }


def layouts(model: Model, devices: int, batch: int, careless: str = "") -> Iterator[Layout]:
    """Yield every layout that there is; careless: "heads" or "layers" need not divide, or "devices" may idle."""
    sizes = range(1, devices + 1)
    for tp, pp in product(sizes, sizes):
        dp = devices // (tp * pp)
        if dp and (dp * tp * pp == devices or careless == "devices"):
            for micro_batch, recompute, shard in product(divisors(batch), (False, True), (False, True)):
                layout = Layout(dp, tp, pp, micro_batch, recompute, shard)
                if all(good or part == careless for part, good in divides(model, layout, batch).items()):
                    yield layout


def divisors(number: int) -> list[int]:
    """Return what divides a number, in order."""
    return [part for part in range(1, number + 1) if number % part == 0]


def best_layout(model: Model, machine: Machine, devices: int, batch: int) -> Layout | None:
    """Return the layout of the shortest step among those whose memory is enough, None if none is."""
    enough = [each for each in layouts(model, devices, batch)
              if sum(memory_bytes(model, each, batch).values()) <= machine.memory_bytes]  # fmt: skip
    return min(enough, key=lambda each: step_seconds(model, each, machine, batch), default=None)


def sustained_efficiency(model: Model, layout: Layout, machine: Machine, batch: int, seconds: float) -> float:
    """Return the efficiency with which a step takes so long: seconds = a / efficiency + b."""
    whole, half = (step_seconds(model, layout, replace(machine, efficiency=e), batch) for e in (1.0, 0.5))
    a = half - whole
    return a / (seconds - (whole - a))
