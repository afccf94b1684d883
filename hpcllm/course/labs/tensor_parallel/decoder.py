"""The decoder that training uses, with the layers of a student in place of ours.

Attention, FeedForward, head --> columns, rows --> autograd --> student's functions, on NumPy arrays
the same decoder, the same weights, our layers ----------------> loss and gradients to compare with
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpcllm.config.schema import ModelConfig
from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.tensor_parallel.ours import share
from hpcllm.model import attention, transformer
from hpcllm.model.initialisation import build
from hpcllm.model.linear import PLAIN, Layers, PassOptions, Weights
from hpcllm.model.recompute import Recompute
from hpcllm.model.shapes import StageSpan
from hpcllm.model.tensor_parallel import TensorParallel
from hpcllm.model.transformer import Decoder

SIZES: dict[str, Any] = {"hidden": 24, "heads": 12, "ffn": 36, "vocabulary": 61, "max_sequence": 16}
STYLE: dict[str, Any] = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": "all"}
BATCH, LENGTH = 2, 9
NEAR = 1e-4  # of the largest value of a gradient; both sides round to float32 in their own order


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Any, comm: MPI.Intracomm, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.student, ctx.comm = student, comm
        ctx.save_for_backward(x, *tensors)
        y = student.columns(_flat(x), _pairs(tensors), comm)
        return tuple(_shaped(each, x) for each in y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        given = [_flat(gradient) for gradient in gradients]
        of_x, of_layers = ctx.student.columns_backward(given, _flat(x), _pairs(tensors), ctx.comm)
        return None, None, _shaped(of_x, x), *(torch.from_numpy(part) for pair in of_layers for part in pair)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Any, comm: MPI.Intracomm, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.student, ctx.comm = student, comm
        ctx.save_for_backward(x, w)
        return _shaped(student.rows(_flat(x), w.detach().numpy(), b.detach().numpy(), comm), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        found = ctx.student.rows_backward(_flat(gradients[0]), _flat(x), w.detach().numpy(), ctx.comm)
        return None, None, _shaped(found[0], x), torch.from_numpy(found[1]), torch.from_numpy(found[2])


def _flat(x: Tensor) -> Any:
    """Return x (..., values) as an array (tokens, values)."""
    return x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()


def _shaped(y: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(y)).view(*like.shape[:-1], -1)


def _pairs(tensors: Any) -> list[tuple[Any, Any]]:
    arrays = [tensor.detach().numpy() for tensor in tensors]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _tensors(layer: Weights) -> tuple[Tensor, Tensor]:
    weight = layer.matrix(torch.float32)
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias


@contextmanager
def layers_of(student: Any, comm: MPI.Intracomm) -> Iterator[None]:
    """Let decoders run on the student's functions."""

    def columns(x: Tensor | Recompute, layers: Layers, _: PassOptions = PLAIN) -> Any:
        value = x.value() if isinstance(x, Recompute) else x
        return _Columns.apply(student, comm, value, *(t for layer in layers for t in _tensors(layer)))  # type: ignore[no-untyped-call]

    def rows(x: Tensor | Recompute, layer: Weights, _: PassOptions = PLAIN) -> Any:
        value = x.value() if isinstance(x, Recompute) else x
        return _Rows.apply(student, comm, value, *_tensors(layer))  # type: ignore[no-untyped-call]

    with ExitStack() as replaced:
        for module in (attention, transformer):
            for name, function in (("columns", columns), ("rows", rows)):
                replaced.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, function)
        yield


def step(decoder: Decoder) -> Tensor:
    """Run one step: the loss; gradients are in .grad. Collective over the decoder's ranks."""
    drawn = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(decoder.model.vocabulary, (2, BATCH, LENGTH), generator=drawn)
    nats = decoder.nats(decoder.hidden_states(tokens), targets).sum()
    nats.backward()  # type: ignore[no-untyped-call]
    return nats.detach()


def made(layers: int, tp: TensorParallel, seed: int) -> Decoder:
    """Build this rank's part of a decoder, biases off zero."""
    model = ModelConfig(layers=layers, **SIZES, **STYLE)
    decoder = build(model, StageSpan(0, layers, has_embedding=True, has_head=True), seed=seed, tp=tp)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.01)
    return decoder


def check_decoder(trial: Trial) -> None:
    """Compare loss and gradients of a step on the student's functions with those on ours."""
    tp = share(trial.control)
    ours, theirs = (made(2, tp, trial.case["seed"]) for _ in range(2))
    loss = step(ours)
    with layers_of(trial.student, trial.comm):
        found = step(theirs)
    if not torch.allclose(found, loss, rtol=NEAR):
        raise LawError("decoder", f"rank {tp.rank} of {tp.size}: the loss is {found:.6g}, not {loss:.6g}")
    for (name, parameter), wanted in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        grad, want = parameter.grad, wanted.grad
        assert want is not None, "every parameter of ours has a gradient"
        if grad is None or (grad - want).abs().max() > NEAR * max(1, want.abs().max().item()):
            raise LawError("decoder", f"rank {tp.rank} of {tp.size}: the gradient of {name} is another")


def count_decoder_sums(trial: Trial) -> float:
    """Count the sums of a step of a decoder of 3 layers."""
    decoder = made(3, share(trial.control), 1)
    student, sums_bytes = summing(trial.student)
    with layers_of(student, trial.comm):
        step(decoder)
    return len(sums_bytes)


def summing(student: Any) -> tuple[SimpleNamespace, list[int]]:
    """Return the student's functions, and a list that gets the bytes of the result of each call that sends.

    A sum counts once, whether it is one call of MPI or made of messages.
    """
    sums_bytes: list[int] = []

    def watched(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            before = arguments[-1].messages
            result = getattr(student, name)(*arguments)
            if arguments[-1].messages > before:
                sums_bytes.append((result if name == "rows" else result[0]).nbytes)
            return result

        return call

    names = ("columns", "columns_backward", "rows", "rows_backward")
    return SimpleNamespace(**{name: watched(name) for name in names}), sums_bytes
