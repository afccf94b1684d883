"""Predict what a rank of each pipeline stage holds, for either trainer, and what its device has to have. Pure.

    tensors     parameters, gradients, optimizer | activations, buffers      predict.py, megatron.py
    reserved    driver, kernels, communicators; gaps between tensors of microbatches that come and go by turns
    cached      held by the allocator for later while there is room: a monitor shows it, another tensor may have it

    fits: tensors + reserved <= what the driver leaves of the device          a monitor: tensors + reserved + cached

Where the constants come from, and how wrong they are: perf/plan/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Machine
from hpcllm.plan.memory.megatron import BUCKET, megatron_memory
from hpcllm.plan.memory.predict import layout_memory
from hpcllm.plan.models import Model

# Of driver and kernels, and of each axis' communicators: 1.6e9 with one, as BLOOM's chronicles say of an idle A100
CONTEXT_BYTES = 1.1e9
COMMUNICATOR_BYTES = 0.5e9
# share of what is kept of several microbatches: of 0, 0.1, 0.15 and 0.2 it tells llama-13b's rows apart best
GAPS = 0.15
CACHED_BUCKETS = 5  # of BUCKET float32 gradients: all 16 stages of LUMI's 175B runs have 10 GB more than their peak
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserved")


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the rank of a pipeline stage that holds most."""

    stage: int  # pipeline rank, with all its chunks
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # at their peak in a step
    buffers: float
    reserved: float  # not available to tensors
    gaps: float = 0.0  # part of reserved: between tensors
    cached: float = 0.0  # at most

    @property
    def allocated_bytes(self) -> float:
        """Bytes held between two steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak_bytes(self) -> float:
        """Bytes of tensors at their peak in a step."""
        return self.allocated_bytes + self.activations + self.buffers

    @property
    def device_bytes(self) -> float:
        """Bytes that the device has to have."""
        return self.peak_bytes + self.reserved

    def as_gb(self) -> dict[str, float]:
        """Return all of it in GB of 1e9 bytes, under the keys of --json."""
        totals = {"allocated": self.allocated_bytes, "peak": self.peak_bytes, "device": self.device_bytes}
        sizes = totals | {part: getattr(self, part) for part in PARTS}
        return {"stage": self.stage} | {key: size / 1e9 for key, size in sizes.items()}

    def shown_bytes(self, usable_bytes: float) -> float:
        """Return what a monitor shows of a device with usable_bytes."""
        return max(self.device_bytes, min(self.device_bytes + self.cached, usable_bytes))


def stage_memory(model: Model, layout: Layout, global_batch: int, machine: Machine) -> tuple[StageMemory, ...]:
    """Predict for each pipeline rank. Raises ConfigError where layout and batch do not fit together."""
    is_host, is_other = machine.device.family == "cpu", layout.trainer == "megatron"
    communicators = sum(n > 1 for n in (layout.dp, layout.pp, layout.tp))
    beside = 0.0 if is_host else CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators
    ranks = (megatron_memory if is_other else layout_memory)(model, layout, global_batch)
    found = []
    for stage, rank in enumerate(ranks):
        held = rank.parameters, rank.gradients, rank.optimizer, rank.activations
        buffers = rank.buffers + (rank.checkpoint if is_host else 0)  # a copy in the host's memory
        gaps, bucket = GAPS * rank.by_turns, min(BUCKET, rank.parameters / layout.item_bytes)
        cached = CACHED_BUCKETS * 4 * bucket if is_other else 0.0
        found.append(StageMemory(stage, *held, buffers, beside + gaps, gaps, cached))
    return tuple(found)
