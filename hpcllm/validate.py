"""Held-out loss: every validation sample once, whatever the layout.

    samples 0, 1, 2, ... in order, a global batch at a time; each replica takes its share of it through the pipeline,
    places past the end are filled with targets that do not count

Bits per byte = summed loss in nats / (ln 2 x bytes of text behind the scored tokens): comparable across tokenizers, and
with what a compressor makes of the same text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from hpcllm.assemble import Parts
from hpcllm.data.sampler import sample_count
from hpcllm.model.loss import IGNORED
from hpcllm.pipeline.schedules import forward_only


@dataclass(frozen=True)
class Validation:
    loss: float  # nats a token
    bits_per_byte: float
    samples: int


def validate(parts: Parts) -> Validation | None:
    """Score the held-out samples; None if there is not one. Collective over the mesh. Raises StallError."""
    config, mesh = parts.config, parts.mesh
    tokens = parts.store.tokens("validation") if parts.store.validation_bytes else np.empty(0, np.uint16)
    samples = min(sample_count(len(tokens), config.data.sequence_length), config.data.validation_sequences)
    if samples < 1:
        return None
    schedule = _schedule(parts.schedule.placement, config.pipeline.microbatches)
    sums = np.zeros(3)  # loss in nats, tokens, bytes
    losses = []
    for start in range(0, samples, config.data.global_batch):
        inputs, targets = _my_share(parts, tokens, start, samples)
        with torch.no_grad():
            losses.append(parts.engine.run(schedule, inputs.to(parts.device), targets.to(parts.device), scale=1.0))
        if parts.has_loss:
            counted = targets[targets != IGNORED].numpy()
            sums[1:] += counted.size, parts.store.token_bytes[counted].sum()
    sums[0] = torch.stack(losses).sum().item()  # read once, not after each batch
    parts.control.allreduce(mesh.world, sums, lambda: "the sum of the validation loss over all ranks")
    nats, count, text_bytes = sums.tolist()
    return Validation(nats / count, nats / math.log(2) / max(1.0, text_bytes), samples)


_schedule = cache(forward_only)  # of all ranks: with many of them it takes as long as a step to make


def _my_share(parts: Parts, tokens: np.ndarray, start: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (microbatches, size, sequence) of this replica's part of the global batch at `start`."""
    config, dp = parts.config, parts.mesh.dp
    length, share = config.data.sequence_length, config.data.global_batch // dp.size
    first = start + dp.rank * share
    rows = np.zeros((share, length + 1), dtype=np.int64)
    for row, sample in enumerate(range(first, min(first + share, samples))):
        rows[row] = tokens[sample * length : (sample + 1) * length + 1]
    batch = torch.from_numpy(rows).view(config.pipeline.microbatches, -1, length + 1)
    targets = batch[..., 1:].clone(memory_format=torch.contiguous_format)  # inputs must not see what is ignored
    targets.view(share, length)[max(0, samples - first) :] = IGNORED
    return batch[..., :-1], targets
