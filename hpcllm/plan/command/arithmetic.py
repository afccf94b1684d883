"""What a prediction is summed up from: each kernel and each collective of the rank that ends last. Pure.

    kernels of a block x blocks x microbatches  +  embedding, head x microbatches   =  compute
    collectives: what passes.py and data_parallel.py ask the network, with bytes and seconds

The planner's own functions are run once more with a network that listens, so nothing is worked out a second way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcllm.plan.network.network import Network
from hpcllm.plan.prediction import Prediction, Step, message_bytes
from hpcllm.plan.stages import alike, held_parameters
from hpcllm.plan.time import kernels
from hpcllm.plan.time.data_parallel import exchange
from hpcllm.plan.time.kernels import Flash, Kernel, Microbatch, Product, microbatch_of
from hpcllm.plan.time.passes import passes
from hpcllm.plan.time.roofline import kernel_s

PASSES = {"forward": "forward", "again": "made again", "backward": "backward", "weight": "weights' gradients"}


@dataclass(frozen=True)
class KernelRow:
    """A kernel of a part of the model. times: in a step, on one rank."""

    part: str  # block, embedding, head
    way: str  # a key of PASSES
    name: str
    shape: str
    flops: float
    moved_bytes: float
    seconds: float  # of one
    times: int

    @property
    def total_s(self) -> float:
        return self.seconds * self.times


@dataclass(frozen=True)
class Exchanged:
    """A collective or a message, once."""

    axis: str  # tp, dp, pp
    operation: str
    size_bytes: float
    ranks: int
    nodes: int
    seconds: float
    how: str  # algorithm or links


@dataclass(frozen=True)
class Listening(Network):
    """The same network; notes what it is asked."""

    heard: list[Exchanged] = field(default_factory=list, compare=False)

    def tensor_s(self, operation: str, size_bytes: float) -> float:
        return self._noted("tp", operation, size_bytes, super().tensor_s(operation, size_bytes))

    def data_s(self, operation: str, size_bytes: float) -> float:
        return self._noted("dp", operation, size_bytes, super().data_s(operation, size_bytes))

    def message_s(self, size_bytes: float, source: int, target: int) -> float:
        taken_s, over = super().message_s(size_bytes, source, target), self.way(source, target)
        how = f"{over.senders} ranks of a node send at once" if over.senders else "inside a node"
        nodes = 2 if over.senders else 1
        self.heard.append(Exchanged("pp", f"stage {source} to {target}", size_bytes, 2, nodes, taken_s, how))
        return taken_s

    def _noted(self, axis: str, operation: str, size_bytes: float, taken_s: float) -> float:
        group = self.spread(axis)
        how = self.how(axis, operation, size_bytes)
        one = Exchanged(axis, operation, size_bytes, group.ranks, group.nodes, taken_s, how)
        if taken_s and one not in self.heard:
            self.heard.append(one)
        return taken_s


@dataclass(frozen=True)
class Arithmetic:
    """Of the rank of `found.slowest`."""

    found: Prediction
    step: Step
    stages: list[int]  # virtual stages of the rank
    blocks: int  # of all of them
    parameters: float  # that it holds
    kernels: list[KernelRow]
    exchanged: list[Exchanged]


def arithmetic(found: Prediction) -> Arithmetic:
    """Work a prediction out once more, aloud."""
    step = Step(found.machine, found.model, found.layout, found.global_batch)
    stages = [step.placement.stage(found.slowest, chunk) for chunk in range(step.placement.chunks)]
    spans = [step.spans[stage] for stage in stages]
    parameters = held_parameters(found.model.shape, tuple(map(alike, spans)), found.layout.tp)
    network = Listening(found.machine, found.layout)
    for span in spans:
        passes(found.model, found.layout, span, found.machine, network)
    exchange(parameters, found.layout, step.microbatches, network)
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
    return Arithmetic(found, step, stages, counts["block"], parameters, rows, network.heard)


def _rows(found: Prediction, counts: Counter[str], microbatches: int) -> Iterator[KernelRow]:
    """Kernels that are the same in a pass share a row."""
    b = microbatch_of(found.model, found.layout)
    pieces = {"embedding": kernels.embedding, "block": kernels.block, "head": kernels.head}
    for part, make in pieces.items():
        for way in PASSES if counts[part] else ():
            for kernel, same in Counter(getattr(make(b), way)).items():
                taken_s = kernel_s(kernel, found.machine.device)
                times = same * counts[part] * microbatches
                if taken_s:
                    flops = 0.0 if isinstance(kernel, kernels.Stream) else kernel.flops
                    name, shape = _said(kernel, b)
                    yield KernelRow(part, way, name, shape, flops, kernel.moved_bytes, taken_s, times)


def _said(kernel: Kernel, b: Microbatch) -> tuple[str, str]:
    """What it is, and its shape."""
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
    """Which layer's, by outputs and inputs."""
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
