"""The project's decoder, trained by replicas and a student's update, beside one rank with the whole batch.

rank r: rows r of the batch --> gradients, flat --> student's update --> parameters, flat      loss: mean over ranks
alone:  all rows            --> gradients       --> PyTorch's clipping and AdamW               loss
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from hpcllm.config.schema import ModelConfig, OptimizerConfig
from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.zero.adamw import Whole
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import StageSpan
from hpcllm.model.transformer import Decoder

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocabulary": 31, "max_sequence": 16}
STEPS, LENGTH = 5, 12
CONFIG = OptimizerConfig(learning_rate=0.01, clip_norm=1.0)
NEAR = 1e-3  # of a loss


def made(seed: int) -> Decoder:
    """Build a small decoder, the same on all ranks."""
    span = StageSpan(0, SIZES["layers"], has_embedding=True, has_head=True)
    return build(ModelConfig(**SIZES), span, seed=seed)


def batches(seed: int, ranks: int) -> Tensor:
    """Draw tokens (steps, ranks, 2, LENGTH): rows for each rank."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocabulary"] // 3, (STEPS, ranks, 2, LENGTH), generator=drawn)


def loss_and_gradients(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next token of rows (B, T); gradients are in .grad."""
    decoder.zero_grad()
    logits = decoder(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def alone(seed: int, ranks: int) -> list[float]:
    """Return the losses of one rank with the whole batch."""
    decoder = made(seed)
    parameters = [p.detach() for p in decoder.parameters()]
    whole = Whole(parameters, CONFIG)
    losses = []
    for tokens in batches(seed, ranks):
        losses.append(float(loss_and_gradients(decoder, tokens.flatten(0, 1))))
        clip_grad_norm_(decoder.parameters(), CONFIG.clip_norm)
        whole.step([_gradient(p) for p in decoder.parameters()])
    return losses


def check_losses(trial: Trial) -> None:
    """Compare the losses of replicas that make the student's update with those of one rank."""
    comm, seed = trial.comm, trial.case["seed"]
    decoder, wanted = made(seed), alone(seed, comm.size)
    flat = parameters_to_vector(decoder.parameters()).detach().numpy()
    state = trial.student.new_state(flat.size, comm)
    for step, (tokens, want) in enumerate(zip(batches(seed, comm.size), wanted, strict=True), start=1):
        own = float(loss_and_gradients(decoder, tokens[comm.rank]))
        loss = trial.control.allreduce(own, MPI.SUM) / comm.size
        if not abs(loss - want) <= NEAR * want:
            said = f"{comm.size} ranks: the loss of step {step} is {loss:.6g}, not {want:.6g}"
            raise LawError("losses", said)
        gradients = parameters_to_vector([_gradient(p) for p in decoder.parameters()]).numpy().astype(np.float32)
        trial.student.update(flat, gradients, state, step, CONFIG, comm)
        vector_to_parameters(torch.from_numpy(flat), decoder.parameters())


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter has one"
    return parameter.grad
