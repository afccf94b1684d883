"""One step: samples -> forward and backward of every microbatch, gradients summed over dp meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcllm.assemble import Parts


@dataclass(frozen=True)
class Local:
    """What one rank has to say of a step."""

    loss: float  # its part, in nats a token of the global batch; 0 on all ranks but that of the last stage
    squares: float  # of its gradients, those that it counts (Gradients.squared_norm)
    samples: int  # hash of the samples that it read, see samples.samples_hash
    input_s: float  # in which it read them, or the next ones


def forward_backward(parts: Parts, step: int, position: int) -> Local:
    """Sum up the gradients of the batch at `position`, times the loss scale.

    step: how many steps the run has made, which decides whether traffic is still exact. Collective over the mesh.
    Raises StallError.
    """
    data, communication, before_s = parts.config.data, parts.config.communication, parts.samples.input_s
    tokens = data.global_batch * data.sequence_length
    exact = step < communication.exact_steps
    parts.engine.set_exact(exact)
    parts.optimizer.weights.exact = exact
    batch = parts.samples.take(position)
    parts.gradients.begin(step, exact)
    loss = parts.engine.run(parts.schedule, batch.inputs, batch.targets, parts.loss_scale.value / tokens)
    parts.samples.read_ahead(position)
    parts.gradients.finish()
    # the one place of a step where the host waits for all that it has handed to the device
    nats, squares = torch.stack([loss, parts.gradients.squared_norm()]).tolist()
    return Local(nats / tokens, squares, batch.hash, parts.samples.input_s - before_s)
