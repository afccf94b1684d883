"""A step as an object that knows its model, layout and batch; the efficiency by bisection."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from hpcllm.course.labs.planner.given import Layout, Machine, Model


@dataclass(frozen=True)
class Step:
    model: Model
    layout: Layout
    batch: int

    @cached_property
    def microbatches(self) -> int:
        return self.batch // self.layout.dp // self.layout.micro_batch

    @cached_property
    def table(self) -> int:
        return self.model.vocabulary * self.model.hidden

    @cached_property
    def layer_weights(self) -> int:
        inner = self.model.ffn * (2 + self.model.gated)
        return self.model.hidden * (4 * self.model.hidden + inner)

    @cached_property
    def own_parameters(self) -> float:
        """Parameters of a device of the first stage."""
        split = self.model.layers // self.layout.pp * self.layer_weights + self.table
        whole = self.model.layers // self.layout.pp * 2 * self.model.hidden
        if self.layout.pp == 1:
            split, whole = split + self.table, whole + self.model.hidden
        return split / self.layout.tp + whole

    def layer_activations(self) -> tuple[float, float]:
        """Bytes of the input of a layer, and of all that it keeps."""
        tokens = self.layout.micro_batch * self.model.sequence
        h, f, t = self.model.hidden, self.model.ffn, self.layout.tp
        channels = 4 * h + (4 * h + (4 * f if self.model.gated else 2 * f)) / t
        return 2.0 * tokens * h, 2.0 * tokens * channels

    def activations(self) -> float:
        one, layer = self.layer_activations()
        layers = self.model.layers // self.layout.pp * min(self.layout.pp, self.microbatches)
        return layers * one + layer if self.layout.recompute else layers * layer

    def work(self) -> float:
        """FLOPs of a device."""
        passes = 4 if self.layout.recompute else 3
        forward = flops(self.model, self.batch * self.model.sequence) / 3
        return passes * forward / (self.layout.dp * self.layout.tp * self.layout.pp)


class Links:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def ring(self, size: float, members: int, apart: int) -> float:
        """Seconds of a ring of members that are so many ranks apart."""
        if members == 1:
            return 0.0
        inside = members * apart <= self.machine.node
        byte_s = 1 / self.machine.near_bytes_per_s if inside else 8 / self.machine.far_bits_per_s
        return 2 * (members - 1) * (self.machine.latency_s + size / members * byte_s)


def parameters(model):
    return int(Step(model, Layout(), 1).own_parameters)


def flops(model, tokens):
    step = Step(model, Layout(), 1)
    products = model.layers * step.layer_weights + step.table
    return 6 * tokens * (products + 2 * model.layers * model.hidden * model.sequence)


def memory_bytes(model, layout, batch):
    step = Step(model, layout, batch)
    n = step.own_parameters
    sharing = layout.dp if layout.shard else 1
    kept = step.activations()
    return {"parameters": 2 * n, "gradients": 2 * n, "states": 12 * n / sharing, "activations": kept}


def step_seconds(model, layout, machine, batch):
    step, links = Step(model, layout, batch), Links(machine)
    one_microbatch = step.work() / machine.peak_flops_per_s / machine.efficiency / step.microbatches
    message = 2 * layout.micro_batch * model.sequence * model.hidden
    sums = model.layers / layout.pp * (6 if layout.recompute else 4)
    one_microbatch += sums * links.ring(message, layout.tp, 1)
    gradients = links.ring(2 * step.own_parameters, layout.dp, layout.tp)
    return (step.microbatches + layout.pp - 1) * one_microbatch + gradients


def sustained_efficiency(model, layout, machine, batch, seconds):
    low, high = 1e-9, 1e3
    for _ in range(200):
        middle = (low * high) ** 0.5
        if step_seconds(model, layout, replace(machine, efficiency=middle), batch) > seconds:
            low = middle
        else:
            high = middle
    return middle


def best_layout(model, machine, devices, batch):
    sizes = range(1, devices + 1)
    found = []
    for dp, tp, pp in product(sizes, sizes, sizes):
        if (
            dp * tp * pp != devices
            or model.layers % pp
            or any(n % tp for n in (model.heads, model.ffn, model.vocabulary))
        ):
            continue
        for micro_batch, recompute, shard in product(range(1, batch + 1), (True, False), (True, False)):
            layout = Layout(dp, tp, pp, micro_batch, recompute, shard)
            if batch % (dp * micro_batch) == 0 and fits(model, layout, machine, batch):
                found.append(layout)
    return min(found, key=lambda layout: step_seconds(model, layout, machine, batch)) if found else None


def fits(model, layout, machine, batch):
    return sum(memory_bytes(model, layout, batch).values()) <= machine.memory_bytes


PREDICTIONS = {"billions": 175, "gigabytes": 18.5, "seconds": 72.0}
