"""How long the passes of one microbatch through one virtual stage take on a rank.

    forward     kernels of the span + collectives over tp
    backward    what recomputation repeats, kernels, gradients of weights; some collectives travel behind the latter

          trainer     forward, a block               backward, a block
          plain       2 all-reduces                  2 all-reduces; ours behind the weights' gradients
          sequence    2 all-gathers,                 2 all-gathers (of gradients), 2 more (of what layers read) and
          parallel    2 reduce-scatters              2 reduce-scatters, both behind products

Sources: arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2.2. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Device, Machine
from hpcllm.plan.models import Model
from hpcllm.plan.network.network import Network
from hpcllm.plan.stages import HALVED
from hpcllm.plan.time import kernels
from hpcllm.plan.time.kernels import Microbatch, Piece, microbatch_of
from hpcllm.plan.time.roofline import seconds

UPDATES = 0.7  # of the memory's bandwidth: what many short kernels over parameters get
BACKGROUND_BYTES = 1 << 20  # ours sends less in line with its work: model/tensor_parallel.py, which imports torch


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass, by what they are spent on. tp_s: collectives over tp that nothing hides."""

    compute_s: float
    tp_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tp_s


@dataclass(frozen=True)
class Passes:
    """Of one microbatch through one virtual stage."""

    forward: Pass
    backward: Pass  # all of it, with what it makes again
    weight_s: float  # the part of backward that makes gradients of weights: no collectives


@dataclass(frozen=True)
class _Times:
    """Seconds of a piece of the model."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    again_s: float = 0.0


def passes(model: Model, layout: Layout, span: StageSpan, machine: Machine, network: Network) -> Passes:
    """Of a microbatch of layout.micro_batch samples on one rank."""
    b, device = microbatch_of(model, layout), machine.device
    blocks = span.last_block - span.first_block
    of_block = _times("block", b, device)
    first = _times("embedding", b, device) if span.has_embedding else _Times()
    last = _times("head", b, device) if span.has_head else _Times()
    forward_s = blocks * of_block.forward_s + first.forward_s + last.forward_s
    weight_s = blocks * of_block.weight_s + first.weight_s + last.weight_s
    backward_s = blocks * (of_block.backward_s + of_block.again_s) + first.backward_s + last.backward_s + weight_s
    exchanged = _exchanged(b, span, network, of_block)
    return Passes(Pass(forward_s, exchanged.forward_s), Pass(backward_s, exchanged.backward_s), weight_s)


@lru_cache(maxsize=4096)
def _times(part: str, b: Microbatch, device: Device) -> _Times:
    piece: Piece = {"block": kernels.block, "embedding": kernels.embedding, "head": kernels.head}[part](b)
    measured = device.measured.of(b.item_bytes) if device.measured else None
    return _Times(
        *(seconds(each, device, measured) for each in (piece.forward, piece.backward, piece.weight, piece.again))
    )


def _exchanged(b: Microbatch, span: StageSpan, network: Network, block: _Times) -> _Times:
    """Collectives over tp that nothing hides."""
    if b.tp == 1:
        return _Times()
    blocks = span.last_block - span.first_block
    size = b.tokens * b.model.hidden * b.item_bytes
    in_line = b.ours and (size < BACKGROUND_BYTES or network.by_cores("tp"))
    halved = network.layout.schedule in HALVED  # the gradients of weights come later: there is nothing to hide behind
    hiding_s = 0.0 if in_line or halved else block.weight_s
    if b.sequence_parallel:
        gather_s, scatter_s = network.tensor_s("allgather", size), network.tensor_s("reduce_scatter", size)
        there_s, back_s = 2 * (gather_s + scatter_s), 2 * gather_s
        back_s += 2 * max(0.0, gather_s + scatter_s - hiding_s / 2)
        head_s = gather_s
    else:
        there_s = 2 * network.tensor_s("allreduce", size)
        back_s = max(0.0, there_s - hiding_s) if b.ours else there_s
        head_s = 0.0
    again_s = there_s if b.recompute == "full" else 0.0
    ends_s = span.has_embedding * there_s / 2 + span.has_head * head_s
    return _Times(blocks * there_s + ends_s, blocks * (back_s + again_s) + span.has_head * there_s / 2)


def optimizer_s(parameters: float, updated: float, layout: Layout, machine: Machine) -> float:
    """The step of AdamW on a rank that holds so many parameters and updates so many of them.

    Of each that it updates: the gradient is made float32, unscaled and squared for its norm; AdamW reads four values
    and writes three; the weight is written anew. Of each that it holds: the gradient's sum becomes zero.
    """
    measured = machine.device.measured.of(4) if machine.device.measured else None
    if measured:
        kernels_s = measured.curve_s("norm", updated) + measured.curve_s("adamw", updated)
        return kernels_s + measured.curve_s("zero", parameters)
    b = 4.0 if layout.precision == "fp32" else layout.item_bytes + 4.0
    moved = updated * (4.0 + 8.0 + 4.0 + 28.0 + b) + 4.0 * parameters
    return moved / (1e9 * machine.device.hbm_gb_s * UPDATES)
