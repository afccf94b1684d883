"""Predict what the ranks of one pipeline rank spend in a step besides waiting: passes, exchange with replicas, AdamW.

    forward     kernels of the span + collectives over tp
    backward    what recomputation repeats, kernels, gradients of weights; some collectives travel behind the latter

          trainer     forward, a block               backward, a block
          plain       2 all-reduces                  2 all-reduces; ours behind the weights' gradients
          sequence    2 all-gathers,                 2 all-gathers (of gradients), 2 more (of what layers read) and
          parallel    2 reduce-scatters              2 reduce-scatters, both behind products

Replicas exchange gradients and weights, which their work hides in part:

    microbatches      F0 F1 ... B0 ... B7  | AdamW |  F0 F1 ...
    hpcllm                              gradients  |  weights           behind the last backward, the next forward pass
    megatron                              gradients weights             after the passes: Megatron-LM, DeepSpeed ZeRO-1
    gradients sharded      gradients of every microbatch, behind its backward pass
    all sharded            weights before every pass, gradients after it, a block or a matrix at a time: FSDP, ZeRO-3

What is hidden is not free: the library's kernels and the device's share multiprocessors and memory, and the first and
the last block wait in any case. Of what travels behind one pass in buckets, the pass has to fill the first, and the
last one travels when it is over: with n of them, 1 - 1/n of the shorter of pass and exchange is hidden. Between CPUs
of one node the cores that compute carry the bytes: nothing hides that. What travels beside every pass is hidden by the
share that a layout says, which is nothing unless told: FSDP hid 0.75 of it on one cluster of H100 (the rows of MPT),
DeepSpeed's ZeRO-3 nothing that could be seen (arXiv:2104.04473, Table 2).

Sources: arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2.2, arXiv:1910.02054 sections 5 and 7, arXiv:2304.11277
section 3.3. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hpcllm.model.shapes import StageSpan
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Device, Machine
from hpcllm.plan.models import HALVED, Model
from hpcllm.plan.time import kernels
from hpcllm.plan.time.kernels import Microbatch, Piece, gradient_bytes, microbatch_of
from hpcllm.plan.time.network import Network
from hpcllm.plan.time.roofline import seconds

UPDATES = 0.7  # share of the memory's bandwidth that many short kernels over parameters get
BACKGROUND_BYTES = 1 << 20  # ours sends less in line with its work: model/tensor_parallel.py, which imports torch
BUCKET_BYTES = 16 << 20  # communication.bucket_mib of a run file that does not say it
WAITS = 1.5  # factor on messages of every pass over several nodes: each waits for its slowest rank; rows of ZeRO-3
MATRICES = 4  # of a block, each gathered by itself where a trainer goes by modules: q k v, output, up (gate), down


@dataclass(frozen=True)
class Pass:
    """Seconds of a pass, by what they are spent on."""

    compute_s: float
    tp_s: float  # collectives over tp that nothing hides

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tp_s


@dataclass(frozen=True)
class Passes:
    """Times of one microbatch through one virtual stage."""

    forward: Pass
    backward: Pass  # all of it, with what it recomputes
    weight_s: float  # the part of backward that makes gradients of weights: no collectives


@dataclass(frozen=True)
class _Times:
    """Seconds of a piece of the model."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    recompute_s: float = 0.0


def passes(model: Model, layout: Layout, span: StageSpan, machine: Machine, network: Network) -> Passes:
    """Time a microbatch of layout.micro_batch samples on one rank of a virtual stage."""
    b, device = microbatch_of(model, layout), machine.device
    blocks = span.last_block - span.first_block
    of_block = _times("block", b, device)
    first = _times("embedding", b, device) if span.has_embedding else _Times()
    last = _times("head", b, device) if span.has_head else _Times()
    forward_s = blocks * of_block.forward_s + first.forward_s + last.forward_s
    weight_s = blocks * of_block.weight_s + first.weight_s + last.weight_s
    backward_s = blocks * (of_block.backward_s + of_block.recompute_s) + first.backward_s + last.backward_s + weight_s
    exposed = _tensor_exchange(b, span, network, of_block)
    return Passes(Pass(forward_s, exposed.forward_s), Pass(backward_s, exposed.backward_s), weight_s)


@lru_cache(maxsize=4096)
def _times(part: str, b: Microbatch, device: Device) -> _Times:
    piece: Piece = {"block": kernels.block, "embedding": kernels.embedding, "head": kernels.head}[part](b)
    measured = device.measured.of(b.item_bytes) if device.measured else None
    parts = (piece.forward, piece.backward, piece.weight, piece.recompute)
    return _Times(*(seconds(each, device, measured) for each in parts))


def _tensor_exchange(b: Microbatch, span: StageSpan, network: Network, block: _Times) -> _Times:
    """Time the collectives over tp that nothing hides."""
    if b.tp == 1:
        return _Times()
    blocks = span.last_block - span.first_block
    size = b.tokens * b.model.hidden * b.item_bytes
    in_line = b.ours and (size < BACKGROUND_BYTES or network.uses_cores("tp"))
    halved = network.layout.schedule in HALVED  # the gradients of weights come later: there is nothing to hide behind
    hiding_s = 0.0 if in_line or halved else block.weight_s
    if b.sequence_parallel:
        gather_s, scatter_s = network.tensor_s("allgather", size), network.tensor_s("reduce_scatter", size)
        forward_s, backward_s = 2 * (gather_s + scatter_s), 2 * gather_s
        backward_s += 2 * max(0.0, gather_s + scatter_s - hiding_s / 2)
        head_s = gather_s
    else:
        forward_s = 2 * network.tensor_s("allreduce", size)
        backward_s = max(0.0, forward_s - hiding_s) if b.ours else forward_s
        head_s = 0.0
    recompute_s = forward_s if b.recompute == "full" else 0.0
    ends_s = span.has_embedding * forward_s / 2 + span.has_head * head_s
    return _Times(blocks * forward_s + ends_s, blocks * (backward_s + recompute_s) + span.has_head * forward_s / 2)


@dataclass(frozen=True)
class Exchange:
    """Seconds that one rank exchanges with its replicas in a step, by what can hide them."""

    after_s: float = 0.0  # behind nothing
    backward_s: float = 0.0  # behind the last backward pass
    forward_s: float = 0.0  # behind the first forward pass of the next step
    passes_s: float = 0.0  # behind all passes
    buckets: int = 1
    hidden: float = 0.0  # share of passes_s that is hidden

    @property
    def total_s(self) -> float:
        return self.after_s + self.backward_s + self.forward_s + self.passes_s


def hideable_s(done: Exchange, forward_s: float, backward_s: float) -> float:
    """Return how much of an exchange the passes of one microbatch hide, if passes and waits are long enough."""
    one_s = min(done.backward_s, backward_s) + min(done.forward_s, forward_s)
    return (1 - 1 / done.buckets) * one_s + done.hidden * done.passes_s


def summed_bytes(layout: Layout) -> float:
    """Return the bytes of a parameter's gradient as it is summed over dp."""
    return 4 if layout.trainer == "hpcllm" or gradient_bytes(layout) >= 4 else 2


def messages_of(blocks: int, layout: Layout) -> int:
    """Return the number of messages in which a rank's weights, of so many blocks, are gathered before a pass."""
    if layout.shard != "all":
        return 1
    return blocks * (layout.messages or (1 if layout.trainer == "hpcllm" else MATRICES))


def exchange(parameters: float, blocks: int, layout: Layout, microbatches: int, network: Network) -> Exchange:
    """Time the exchange over dp of a rank whose stages have so many parameters (before shard=all divides them)."""
    if layout.dp == 1:
        return Exchange()
    gradients, weights = summed_bytes(layout) * parameters, layout.item_bytes * parameters
    messages = messages_of(blocks, layout)
    if layout.shard == "none":
        sum_s, gather_s = network.data_s("allreduce", gradients), 0.0
    else:
        sum_s = messages * network.data_s("reduce_scatter", gradients / messages)
        gather_s = messages * network.data_s("allgather", weights / messages)
    ours, buckets = layout.trainer == "hpcllm", math.ceil(gradients / BUCKET_BYTES)
    if ours and network.uses_cores("dp"):
        times = microbatches if layout.shard in ("states+gradients", "all") else 1
        return Exchange(after_s=times * sum_s + gather_s * (2 * times if layout.shard == "all" else 1))
    if layout.shard == "all":
        waits = WAITS if network.spread("dp").nodes > 1 else 1.0
        return Exchange(passes_s=waits * microbatches * (2 * gather_s + sum_s), hidden=layout.hidden)
    if layout.shard == "states+gradients":
        passes_s = microbatches * sum_s
        after_s, forward_s = (0.0, gather_s) if ours else (gather_s, 0.0)
        return Exchange(after_s, 0.0, forward_s, passes_s, buckets if ours else 1, layout.hidden)
    return Exchange(0.0, sum_s, gather_s, buckets=buckets) if ours else Exchange(sum_s + gather_s)


def ends_s(model: Model, layout: Layout, network: Network) -> float:
    """Return the seconds in which both ends of a pipeline sum the gradients of the embedding that they share."""
    if layout.pp == 1 or not model.shape.tied:
        return 0.0
    size = summed_bytes(layout) * model.shape.vocabulary * model.shape.hidden / layout.tp
    return network.message_s(size, 0, layout.pp - 1)


def optimizer_s(parameters: float, updated: float, layout: Layout, machine: Machine) -> float:
    """Return the seconds of AdamW on a rank that holds `parameters` and updates `updated` of them.

    For each that it updates, AdamW reads four values and writes three, and the weight is written anew in 16 bit: ours
    in the same pass, others read the masters again. They make the gradient float32, unscale it and square it for the
    norm, and for each parameter that they hold its sum becomes zero; ours only reads it for the norm, and AdamW
    unscales it on the way (optim/gpu/fused_adamw.py).
    """
    if machine.device.measured and (times := machine.device.measured.of(4)):
        return times.curve_s("norm", updated) + times.curve_s("adamw", updated)
    narrowed = 0.0 if layout.precision == "fp32" else float(layout.item_bytes)
    if layout.trainer == "hpcllm":
        moved = updated * (4.0 + 28.0 + narrowed)
    else:
        moved = updated * (4.0 + 8.0 + 4.0 + 28.0 + 4.0 + narrowed) + 4.0 * parameters
    return moved / (1e9 * machine.device.hbm_gb_s * UPDATES)
