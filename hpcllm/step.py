"""One step: samples -> forward and backward of every microbatch, gradients summed over dp meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpcllm.assemble import Parts
from hpcllm.data.sampler import read_batch

HASH_BITS = 32


@dataclass(frozen=True)
class Local:
    """What one rank has to say of a step."""

    loss: float  # its part, in nats a token of the global batch; 0 on all ranks but that of the last stage
    samples: int  # hash of the samples that it read, see samples_hash


def forward_backward(parts: Parts, step: int, position: int) -> Local:
    """Sum up the gradients of the batch at `position`, times the loss scale.

    step: how many steps the run has made, which decides whether traffic is still exact. Collective over the mesh.
    Raises StallError.
    """
    data, communication = parts.config.data, parts.config.communication
    tokens = data.global_batch * data.sequence_length
    exact = step < communication.exact_steps
    parts.engine.set_exact(exact)
    parts.optimizer.weights.exact = exact
    rows, first = _my_samples(parts, position)
    batch = torch.from_numpy(rows).view(parts.config.pipeline.microbatches, -1, data.sequence_length + 1)
    parts.gradients.begin(step, exact)
    loss = parts.engine.run(
        parts.schedule, batch[..., :-1], batch[..., 1:].contiguous(), parts.loss_scale.value / tokens
    )
    parts.gradients.finish()
    return Local(loss / tokens, samples_hash(rows, first))


def samples_hash(rows: NDArray[np.int64], first: int) -> int:
    """Sum of a 32-bit hash of each sample and its position in the run, modulo 2^32.

    rows: (samples, tokens), those at positions first, first + 1, .. Sums of ranks add up to that of all samples, so it
    is the same however they are shared out, and another where two of them change places.
    """
    hashes = (xxhash.xxh3_64_intdigest(row.data, seed=first + at) for at, row in enumerate(rows))
    return sum(hashes) % (1 << HASH_BITS)


def _my_samples(parts: Parts, position: int) -> tuple[NDArray[np.int64], int]:
    """(samples, sequence + 1): this replica's share of the samples from `position` on, and where it begins."""
    data, dp = parts.config.data, parts.mesh.dp
    share = data.global_batch // dp.size
    first = position + dp.rank * share
    return read_batch(parts.tokens, parts.sampler, data.sequence_length, first, share), first
