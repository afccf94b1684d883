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

from hpcllm.config.schema import Config
from hpcllm.data.sampler import sample_count
from hpcllm.data.store import TokenStore
from hpcllm.model.loss import IGNORED
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.schedules import forward_only


@dataclass(frozen=True)
class Validation:
    """Result of a validation over all samples."""

    loss: float  # nats a token
    bits_per_byte: float
    samples: int


def validate(config: Config, mesh: Mesh, store: TokenStore, engine: Engine, control: Waits) -> Validation | None:
    """Score the held-out samples; None if there is not one. Collective over the mesh. Raises StallError.

    control: waits for the sum over all ranks.
    """
    tokens = store.tokens("validation") if store.validation_bytes else np.empty(0, np.uint16)
    samples = min(sample_count(len(tokens), config.data.sequence_length), config.data.validation_sequences)
    if samples < 1:
        return None
    schedule = _schedule(engine.link.placement, config.pipeline.microbatches)
    has_loss = engine.chunks[-1].decoder.span.has_head and mesh.tp.rank == 0  # one rank of each replica
    device = engine.link.device
    sums = np.zeros(3)  # loss in nats, tokens, bytes
    losses = []
    for start in range(0, samples, config.data.global_batch):
        inputs, targets = _my_share(config, mesh, tokens, start, samples)
        with torch.no_grad():
            losses.append(engine.run(schedule, inputs.to(device), targets.to(device), scale=1.0))
        if has_loss:
            counted = targets[targets != IGNORED].numpy()
            sums[1:] += counted.size, store.token_bytes[counted].sum()
    sums[0] = torch.stack(losses).sum().item()  # read once, not after each batch
    control.allreduce(mesh.world, sums, lambda: "the sum of the validation loss over all ranks")
    nats, count, text_bytes = sums.tolist()
    return Validation(nats / count, nats / math.log(2) / max(1.0, text_bytes), samples)


_schedule = cache(forward_only)  # for all ranks of a large pipeline it takes as long as a step to make


def _my_share(
    config: Config, mesh: Mesh, tokens: np.ndarray, start: int, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read this replica's part of the global batch at `start`: inputs and targets (microbatches, size, sequence)."""
    length, share = config.data.sequence_length, config.data.global_batch // mesh.dp.size
    first = start + mesh.dp.rank * share
    rows = np.zeros((share, length + 1), dtype=np.int64)
    for row, sample in enumerate(range(first, min(first + share, samples))):
        rows[row] = tokens[sample * length : (sample + 1) * length + 1]
    batch = torch.from_numpy(rows).view(config.pipeline.microbatches, -1, length + 1)
    targets = batch[..., 1:].clone(
        memory_format=torch.contiguous_format
    )  # inputs keep the tokens that are ignored here
    targets.view(share, length)[max(0, samples - first) :] = IGNORED
    return batch[..., :-1], targets
