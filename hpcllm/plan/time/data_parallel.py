"""What replicas exchange in a step, and how much of it their work hides.

    microbatches      F0 F1 ... B0 ... B7  | AdamW |  F0 F1 ...
    hpcllm                              gradients  |  weights           behind the last backward, the next forward pass
    megatron                              gradients weights             after the passes: Megatron-LM, DeepSpeed ZeRO-1
    gradients sharded      gradients of every microbatch, behind its backward pass
    all sharded            weights before every pass, gradients after it, block by block: FSDP, ZeRO-3

What is hidden is not free: the library's kernels and the device's share multiprocessors and memory, and the first and
the last block wait in any case. Of what travels behind one pass in buckets, the pass has to fill the first, and the
last one travels when it is over: with n of them, 1 - 1/n of the shorter of pass and exchange is hidden. Between CPUs
of one node the cores that compute carry the bytes: nothing hides that. Sources: arXiv:1910.02054 sections 5 and 7,
arXiv:2304.11277 section 3.3. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcllm.plan.layouts import Layout
from hpcllm.plan.models import Model
from hpcllm.plan.network.network import Network

BUCKET_BYTES = 16 << 20  # communication.bucket_mib of a run file that does not say it
HIDDEN_EACH = 0.75  # of one beside all passes, which take longer for it: by the rows of MPT on H100


@dataclass(frozen=True)
class Exchange:
    """Seconds on the network of one rank in a step, by what it can hide behind."""

    after_s: float = 0.0  # nothing
    backward_s: float = 0.0  # the last backward pass
    forward_s: float = 0.0  # the first forward pass of the next step
    passes_s: float = 0.0  # all passes
    buckets: int = 1

    @property
    def total_s(self) -> float:
        return self.after_s + self.backward_s + self.forward_s + self.passes_s


def hideable_s(done: Exchange, forward_s: float, backward_s: float) -> float:
    """Seconds of an exchange that a rank's passes and waits hide, if they are as long: of one microbatch's passes."""
    one_s = min(done.backward_s, backward_s) + min(done.forward_s, forward_s)
    return (1 - 1 / done.buckets) * one_s + HIDDEN_EACH * done.passes_s


def gradient_bytes(layout: Layout) -> float:
    """Of a parameter's gradient, in all the copies that the trainer keeps."""
    if layout.gradient_bytes:
        return layout.gradient_bytes
    return {"fp32": 4, "fp16": 2, "bf16": 6}[layout.precision] if layout.trainer == "megatron" else 4


def summed_bytes(layout: Layout) -> float:
    """Of a parameter's gradient as it is summed over dp."""
    return 4 if layout.trainer == "hpcllm" or gradient_bytes(layout) >= 4 else 2


def exchange(parameters: float, layout: Layout, microbatches: int, network: Network) -> Exchange:
    """Of a rank whose stages have so many parameters, all of them or its share with shard=all."""
    if layout.dp == 1:
        return Exchange()
    gradients, weights = summed_bytes(layout) * parameters, layout.item_bytes * parameters
    if layout.shard == "none":
        sum_s, gather_s = network.data_s("allreduce", gradients), 0.0
    else:
        sum_s, gather_s = network.data_s("reduce_scatter", gradients), network.data_s("allgather", weights)
    ours, buckets = layout.trainer == "hpcllm", math.ceil(gradients / BUCKET_BYTES)
    if ours and network.by_cores("dp"):
        times = microbatches if layout.shard in ("states+gradients", "all") else 1
        return Exchange(after_s=times * sum_s + gather_s * (2 * times if layout.shard == "all" else 1))
    if layout.shard == "all":
        return Exchange(passes_s=microbatches * (2 * gather_s + sum_s))
    if layout.shard == "states+gradients":
        passes_s = microbatches * sum_s
        return Exchange(0.0, 0.0, gather_s, passes_s, buckets) if ours else Exchange(gather_s, passes_s=passes_s)
    return Exchange(0.0, sum_s, gather_s, buckets=buckets) if ours else Exchange(sum_s + gather_s)


def ends_s(model: Model, layout: Layout, network: Network) -> float:
    """Seconds in which both ends of a pipeline sum the gradients of the embedding that they share."""
    if layout.pp == 1 or not model.shape.tied:
        return 0.0
    size = summed_bytes(layout) * model.shape.vocabulary * model.shape.hidden / layout.tp
    return network.message_s(size, 0, layout.pp - 1)
