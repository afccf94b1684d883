"""Print the whole arithmetic of one layout's prediction, to be followed with a pocket calculator. Pure.

kernels     FLOPs, bytes, seconds of each, times how often     their sum is `compute`
tp, pp      each collective and message: bytes, ranks, GB/s    what of them is not hidden
schedule    microbatches and passes: how long the rank waits
dp          gradients and weights of a step, hidden and not
optimizer, memory

Kernels and collectives are those of the rank that ends last. The planner's own functions are run once more with a
network that records each request, so nothing is worked out a second way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpcllm.plan.cost import training_cost
from hpcllm.plan.models import held_parameters, kind_of
from hpcllm.plan.prediction import Prediction, Step, message_bytes
from hpcllm.plan.report import as_dict, layout_text, memory_table, merged, step_table, verdict, wrapped
from hpcllm.plan.time import kernels
from hpcllm.plan.time.kernels import Flash, Kernel, Microbatch, Product, microbatch_of
from hpcllm.plan.time.network import Network
from hpcllm.plan.time.passes import exchange, passes
from hpcllm.plan.time.roofline import kernel_s
from hpcllm.system.text import table

PASSES = {"forward": "forward", "again": "recomputed", "backward": "backward", "weight": "weights' gradients"}
KERNELS = ("kernel", "m x n x k, or values", "GFLOP", "MB", "ms", "at", "times", "s a step")


@dataclass(frozen=True)
class KernelRow:
    """A kernel of a part of the model."""

    part: str  # block, embedding, head
    way: str  # a key of PASSES
    name: str
    shape: str
    flops: float
    moved_bytes: float
    seconds: float  # one launch
    times: int  # in a step, on one rank

    @property
    def total_s(self) -> float:
        return self.seconds * self.times


@dataclass(frozen=True)
class Exchanged:
    """One collective or message."""

    axis: str  # tp, dp, pp
    operation: str
    size_bytes: float
    ranks: int
    nodes: int
    seconds: float
    how: str  # algorithm or links


@dataclass(frozen=True)
class RecordingNetwork(Network):
    """Network that records each collective and message that is requested."""

    recorded: list[Exchanged] = field(default_factory=list, compare=False)

    def tensor_s(self, operation: str, size_bytes: float) -> float:
        return self._record("tp", operation, size_bytes, super().tensor_s(operation, size_bytes))

    def data_s(self, operation: str, size_bytes: float) -> float:
        return self._record("dp", operation, size_bytes, super().data_s(operation, size_bytes))

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        taken_s, senders = super().message_s(size_bytes, source, target), self.way(source, target).senders
        how = f"{senders} ranks of a node send at once" if senders else "inside a node"
        operation, nodes = f"stage {source} to {target}", 2 if senders else 1
        self.recorded.append(Exchanged("pp", operation, size_bytes, 2, nodes, taken_s, how))
        return taken_s

    def _record(self, axis: str, operation: str, size_bytes: float, taken_s: float) -> float:
        group, how = self.spread(axis), self.describe(axis, operation, size_bytes)
        one = Exchanged(axis, operation, size_bytes, group.ranks, group.nodes, taken_s, how)
        if taken_s and one not in self.recorded:
            self.recorded.append(one)
        return taken_s


@dataclass(frozen=True)
class Arithmetic:
    """Kernels and messages of the rank that ends last, found.slowest."""

    found: Prediction
    step: Step
    stages: list[int]  # virtual stages of the rank
    parts: Counter[str]  # number of blocks, embeddings and heads of these stages
    parameters: float  # held by the rank
    kernels: list[KernelRow]
    exchanged: list[Exchanged]


def arithmetic(found: Prediction) -> Arithmetic:
    """Work a prediction out once more and record each part."""
    step = Step(found.machine, found.model, found.layout, found.global_batch)
    stages = [step.placement.stage(found.slowest, chunk) for chunk in range(step.placement.chunks)]
    spans = [step.spans[stage] for stage in stages]
    parameters = held_parameters(found.model.shape, tuple(map(kind_of, spans)), found.layout.tp)
    network = RecordingNetwork(found.machine, found.layout)
    for span in spans:
        passes(found.model, found.layout, span, found.machine, network)
    blocks = sum(span.last_block - span.first_block for span in spans)
    exchange(parameters, blocks, found.layout, step.microbatches, network)
    if found.layout.pp > 1:
        rank, size = found.slowest, message_bytes(found.model, found.layout)
        for other in (rank - 1, rank + 1):
            if 0 <= other < found.layout.pp:
                network.message_s(size, rank, other)
    counts = Counter(
        block=sum(span.last_block - span.first_block for span in spans),
        embedding=sum(span.has_embedding for span in spans),
        head=sum(span.has_head for span in spans),
    )
    rows = list(_rows(found, counts, step.microbatches))
    return Arithmetic(found, step, stages, counts, parameters, rows, network.recorded)


def _rows(found: Prediction, counts: Counter[str], microbatches: int) -> Iterator[KernelRow]:
    """Yield the kernels; those that are the same in a pass share a row."""
    b, parts = microbatch_of(found.model, found.layout), ("embedding", "block", "head")
    for part, way in itertools.product((part for part in parts if counts[part]), PASSES):
        piece = getattr(kernels, part)(b)
        for kernel, same in Counter(getattr(piece, "recompute" if way == "again" else way)).items():
            if taken_s := kernel_s(kernel, found.machine.device):
                flops = 0.0 if isinstance(kernel, kernels.Stream) else kernel.flops
                times = same * counts[part] * microbatches
                yield KernelRow(part, way, *_describe(kernel, b), flops, kernel.moved_bytes, taken_s, times)


def _describe(kernel: Kernel, b: Microbatch) -> tuple[str, str]:
    """Return name and shape of a kernel."""
    match kernel:
        case Product():
            batch = f"{kernel.batch:g} x " if kernel.batch != 1 else ""
            return f"product, {_layer(kernel, b)}", f"{batch}{kernel.m:g} x {kernel.n:g} x {kernel.k:g}"
        case Flash():
            way = "backward" if kernel.backward else "forward"
            return f"flash {way}", f"{kernel.heads:g} x {kernel.sequence:g} x {kernel.channels:g}"
        case _:
            return kernel.kernel.replace("_", " "), f"{kernel.values:.4g} x {kernel.value_bytes:g} bytes"


def _layer(kernel: Product, b: Microbatch) -> str:
    """Name the layer of a product, by outputs and inputs."""
    if kernel.batch != 1:
        return "scores or values"
    sides = {"forward": (kernel.n, kernel.k), "input": (kernel.k, kernel.n), "weight": (kernel.m, kernel.n)}
    h, up, kept = b.model.hidden, b.model.ffn / b.tp, b.queries + 2 * b.keys
    layers = {
        (b.model.vocabulary / b.tp, h): "logits",
        (2 * up, h): "gate and up",
        (up, h): "up",
        (h, up): "down",
        (b.keys, h): "key or value",
        (kept, h): "query key value",
        (h, b.queries): "output",
    }
    return layers.get(sides[kernel.orientation], "query")


def lines(found: Prediction, tokens: float | None) -> list[str]:
    """Write the arithmetic for people."""
    worked, cost = arithmetic(found), training_cost(found, tokens)
    days = f"{cost.tokens:.4g} tokens / {found.tokens_per_s:,.0f} tokens/s = {cost.days:.4g} days"
    hours = f"x 24 x {cost.nodes} nodes = {cost.node_hours:,.0f} node-hours"
    sections = [
        [*wrapped(f"{found.model.name} on {found.machine.name}: {layout_text(found.layout)}"), *_rank(worked)],
        _kernels(worked),
        _exchanged(worked),
        _schedule(worked),
        step_table(found),
        _work(found),
        [*memory_table(found), *wrapped(_kept(worked), verdict(found))],
        wrapped(f"{days}; {hours}; x {found.machine.power.node_w / 1000:g} kW = {cost.energy_kwh:,.0f} kWh (estimate)"),
    ]
    return [line for section in sections for line in ("", *section)][1:]


def as_json(found: Prediction, tokens: float | None) -> dict[str, Any]:
    """Return the arithmetic and the prediction for --json; sizes in bytes, times in seconds."""
    worked = arithmetic(found)
    return as_dict(found, tokens) | {
        "slowest_stage": found.slowest,
        "parameters_of_rank": worked.parameters,
        "kernels": [vars(row) | {"total_s": row.total_s} for row in worked.kernels],
        "exchanged": [vars(one) for one in worked.exchanged],
        "passes": [
            {"stage": stage}
            | {f"forward_{key}": seconds for key, seconds in vars(one.forward).items()}
            | {f"backward_{key}": seconds for key, seconds in vars(one.backward).items()}
            for stage, one in enumerate(worked.step.passes)
        ],
    }


def _rank(worked: Arithmetic) -> list[str]:
    found, blocks = worked.found, worked.parts["block"]
    ends = "".join(f", the {end}" for end in ("embedding", "head") if worked.parts[end])
    return [
        f"of stage {found.slowest}, which ends last: {blocks} block{'s' * (blocks != 1)}{ends}; "
        f"{worked.parameters:,.0f} parameters a rank",
        f"microbatches: {found.global_batch} samples / (dp {found.layout.dp} x micro-batch {found.layout.micro_batch}) "
        f"= {worked.step.microbatches}",
    ]


def _kernels(worked: Arithmetic) -> Iterator[str]:
    for (part, way), rows in itertools.groupby(worked.kernels, lambda row: (row.part, row.way)):
        yield f"{part}, {PASSES[way]}"
        yield from table(KERNELS, [_kernel(row) for row in rows])
    total_s = sum(row.total_s for row in worked.kernels)
    yield f"all of these: {total_s:.4g} s a step (compute)"


def _kernel(row: KernelRow) -> list[str]:
    gflop, rate = "", f"{row.moved_bytes / row.seconds / 1e9:.0f} GB/s"
    if row.flops:
        gflop, rate = f"{row.flops / 1e9:.4g}", f"{row.flops / row.seconds / 1e12:.1f} TFLOP/s"
    moved, taken = f"{row.moved_bytes / 1e6:.4g}", f"{1e3 * row.seconds:.4g}"
    return [row.name, row.shape, gflop, moved, taken, rate, str(row.times), f"{row.total_s:.4g}"]


def _exchanged(worked: Arithmetic) -> Iterator[str]:
    if not worked.exchanged:
        yield "no collectives: tp, pp and dp are 1"
        return
    formula = "collectives/cost.py" if worked.found.layout.trainer == "hpcllm" else "plan/time/network.py"
    yield f"collectives and messages, once each; formulas: {formula}"
    rows = []
    for one in worked.exchanged:
        size, taken = f"{one.size_bytes / 1e6:.4g}", f"{1e3 * one.seconds:.4g}"
        rate = f"{one.size_bytes / one.seconds / 1e9:.3g}"
        rows.append([one.axis, one.operation, str(one.ranks), str(one.nodes), size, taken, rate, one.how])
    yield from table(("axis", "operation", "ranks", "nodes", "MB", "ms", "GB/s (MB / ms)", "how"), rows)


def _schedule(worked: Arithmetic) -> Iterator[str]:
    """Write what a microbatch takes on each stage, and how the bubble comes about."""
    found, layout, m = worked.found, worked.found.layout, worked.step.microbatches
    mine = [worked.step.passes[stage] for stage in worked.stages]
    forward = sum(one.forward.compute_s for one in mine), sum(one.forward.tp_s for one in mine)
    backward = sum(one.backward.compute_s for one in mine), sum(one.backward.tp_s for one in mine)
    yield "a microbatch on each virtual stage, in ms"
    yield from _stages(worked)
    yield f"compute   {m} x ({forward[0]:.5g} + {backward[0]:.5g}) s = {found.compute_s:.4g} s"
    yield f"tp        {m} x ({forward[1]:.5g} + {backward[1]:.5g}) s = {found.tp_s:.4g} s that nothing hides"
    yield (
        f"bubble    {layout.schedule} of {layout.pp} rank{'s' * (layout.pp > 1)} and {layout.chunks} "
        f"chunk{'s' * (layout.chunks > 1)}, run action by action: {found.bubble_s:.4g} s of waiting"
    )
    if layout.schedule in ("1f1b", "gpipe") and layout.pp > 1:
        each_s = sum(forward) + sum(backward)
        yield f"          were all stages like this one: (pp - 1) x {each_s:.4g} s = {(layout.pp - 1) * each_s:.4g} s"
    yield f"pp        the same with messages: {found.pp_s:.4g} s more"
    all_s, hidden_s = found.dp_exposed_s + found.dp_hidden_s, found.dp_hidden_s
    yield f"dp        {all_s:.4g} s of exchange, less {hidden_s:.4g} s behind work: {found.dp_exposed_s:.4g} s"
    yield f"optimizer {found.optimizer_s:.4g} s, by the bytes that it reads and writes"


def _stages(worked: Arithmetic) -> list[str]:
    """Write a line a stage; neighbours that are alike share one."""
    rows = []
    for span, one, sent in zip(worked.step.spans, worked.step.passes, worked.step.times, strict=True):
        times_s = (one.forward.compute_s, one.forward.tp_s, one.backward.compute_s, one.backward.tp_s)
        messages = f"{1e3 * (sent.send_forward_s + sent.send_backward_s):.3g}"
        rows.append([f"{span.last_block - span.first_block}", *(f"{1e3 * each_s:.4g}" for each_s in times_s), messages])
    return table(("stage", "blocks", "forward", "tp", "backward", "tp", "messages"), merged(rows))


def _kept(worked: Arithmetic) -> str:
    """Say how many bytes of each parameter stay from step to step."""
    stage, n = worked.found.memory[worked.found.slowest], worked.parameters
    parts = " + ".join(f"{size / n:.4g}" for size in (stage.parameters, stage.gradients, stage.optimizer))
    return (
        f"stage {stage.stage} keeps of each of its {n:,.0f} parameters {parts} = {stage.allocated_bytes / n:.4g} bytes "
        "(weight, gradient, optimizer)"
    )


def _work(found: Prediction) -> list[str]:
    """Write the FLOPs in both conventions."""
    tokens, devices, seconds = found.global_batch * found.model.sequence, found.layout.devices, found.iteration_time_s
    model = found.model.flops_per_token * tokens
    return [
        f"work of the model: {found.model.flops_per_token:.4g} FLOPs a token x {tokens:,} tokens = {model:.4g} FLOPs",
        f"  / {seconds:.4g} s / {devices} devices = {found.tflops_per_device_model:.4g} TFLOP/s; "
        f"/ peak {found.machine.device.peak_bf16_tflops:g} = MFU {found.mfu:.2%}",
        f"with recomputation: {found.hardware_flops:.4g} FLOPs, "
        f"{found.tflops_per_device_hardware:.4g} TFLOP/s a device",
    ]
