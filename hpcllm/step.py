"""One step: samples -> forward and backward of every microbatch, gradients summed over dp meanwhile."""

from __future__ import annotations

import torch

from hpcllm.assemble import Parts
from hpcllm.data.sampler import read_batch


def forward_backward(parts: Parts, step: int, position: int) -> float:
    """Sum up the gradients of the batch at `position`, times the loss scale; returns this rank's part of the loss.

    step: how many steps the run has made, which decides whether traffic is still exact. The part is in nats a token of
    the global batch and 0 on all ranks but that of the last stage. Collective over the mesh. Raises StallError.
    """
    data, communication = parts.config.data, parts.config.communication
    tokens = data.global_batch * data.sequence_length
    exact = step < communication.exact_steps
    parts.engine.set_exact(exact)
    parts.optimizer.weights.exact = exact
    inputs, targets = _my_samples(parts, position)
    parts.gradients.begin(step, exact)
    loss = parts.engine.run(parts.schedule, inputs, targets, parts.loss_scale.value / tokens)
    parts.gradients.finish()
    return loss / tokens


def _my_samples(parts: Parts, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (microbatches, size, sequence): this replica's share of the samples from `position` on."""
    data, dp = parts.config.data, parts.mesh.dp
    share = data.global_batch // dp.size
    rows = read_batch(parts.tokens, parts.sampler, data.sequence_length, position + dp.rank * share, share)
    batch = torch.from_numpy(rows).view(parts.config.pipeline.microbatches, -1, data.sequence_length + 1)
    return batch[..., :-1], batch[..., 1:].contiguous()
