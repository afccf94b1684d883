"""Operations of the model by one kernel each, on devices that kernels can be compiled for; forward and backward.

e: bytes of a value; the bound: each operand read once, each result written once, one launch a direction

                          forward, bytes a value         backward                        by PyTorch's operations
    cross entropy         e           1 launch           2e, in place     1 launch       36 + e, 6; 12 + e, 2
    rotary, q and k       2e          1                  2e               1              14e, 8;    14e, 8
        of packed rows    2e and 8 bytes a token: its place in its document
    SwiGLU                3e          1                  5e               1              5e, 2;     9e, 3
    RMSNorm               2e          1                  3e + 1           2              28 + 4e, 8; 72 + 8e, 16
    ... with the sum      4e          1                  4e + 1           2              3e more, 1; 3e more, 1
        in front of it

The gradient of a norm's weight is a sum over tokens: a group of the backward pass adds up those of its 8 tokens, which
takes a byte a value there and back, and a second kernel those of all groups. That is for up to 2048 channels; of more,
whose sums have no room in registers, x and g are read once more: 2e - 1 above these, and 3 launches. Everything is
computed in float32 between one rounding to the type of the values and the next; sums have one order, so that bits
repeat. Not while torch.compile traces: it fuses by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpcllm.codecs.gpu.compiler import Program
from hpcllm.codecs.gpu.launch import LANES, VALUE_NAMES, Launcher, launcher_of
from hpcllm.model import eager

STEP_VALUES = 4 * LANES  # that a group takes at once, as common.cuh says
SWIGLU_GROUP_VALUES = 4 * STEP_VALUES  # as swiglu.cu says
PART_ROWS, WIDE_PART_ROWS = 8, 64  # whose products a group adds up for the gradient of a norm's weight
MOST_COLUMNS = 16  # quads of a row that a lane keeps sums of: rows of up to 2048 values
ADDED_COLUMNS = 8  # of all parts, that a group adds up, as rms_norm.cuh says


def kernels(*tensors: Tensor) -> Launcher | None:
    """Return the launcher of kernels for these, which lie on one device; None: use PyTorch's operations."""
    dtypes, device = {x.dtype for x in tensors}, tensors[0].device.type
    if len(dtypes) > 1 or dtypes.isdisjoint(VALUE_NAMES) or torch.compiler.is_compiling():
        return None
    return launcher_of(device)[0]


def program(source: str, dtype: torch.dtype, *macros: str, parts: tuple[str, ...] = ()) -> Program:
    """Return the text of a kernel in this folder for values of a type."""
    return Program(source, (f"VALUE={VALUE_NAMES[dtype]}", *macros), parts, Path(__file__).parent)


def row_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the log of the sum of exp of each row, and the logit of its target, or 0 where that is not here.

    logits: (..., size), of this rank's part of the vocabulary, from `first` on; targets: (...) int64. Both results are
    float32 (...). Reads each logit once. Needs `kernels`.
    """
    own, scores = logits.new_empty(2, *targets.shape, dtype=torch.float32)
    _launch_entropy("statistics", logits, [logits.contiguous(), targets.contiguous(), first, own, scores])
    return own, scores


def subtract_one_hot(logits: Tensor, targets: Tensor, first: int, normaliser: Tensor, upstream: Tensor) -> Tensor:
    """Overwrite the logits by upstream (softmax - 1 at the target), 0 for tokens that do not count; returns them.

    normaliser: (...) float32, the log of the sum of exp over the whole vocabulary; upstream: (...) float32, a weight a
    token. Reads and writes each logit once. Needs `kernels`.
    """
    logits = logits.contiguous()
    operands: list[Tensor | int] = [logits, normaliser, targets.contiguous(), first, upstream.contiguous()]
    _launch_entropy("gradient", logits, operands)
    torch.autograd.graph.increment_version(logits)  # so that PyTorch rejects a second backward pass
    return logits


def _launch_entropy(kernel: str, logits: Tensor, arguments: Sequence[Tensor | int]) -> None:
    size = logits.shape[-1]
    rows = logits.numel() // size
    _launch(program("rows", logits.dtype, parts=("cross_entropy.cuh",)), kernel, rows, [*arguments, size, rows])


def rotate(q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys (attention.apply_rotary) in one pass. Needs `kernels`.

    q: (B, T, H, K), k: (B, T, G, K) of one type; table: (2, T, 1, R) float32, or with positions, (B, T) int64 of each
    token, (2, more than the largest of them, 1, R).
    """
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(q, k, table, positions)  # type: ignore[no-untyped-call]
    return rotated


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.table, ctx.positions = table, positions
        return _rotated(q, k, table, positions, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_rotated(of_q, of_k, ctx.table, ctx.positions, is_backward=True), None, None


def _rotated(q: Tensor, k: Tensor, table: Tensor, positions: Tensor | None, is_backward: bool) -> tuple[Tensor, Tensor]:
    q, k = q.contiguous(), k.contiguous()
    results = torch.empty_like(q), torch.empty_like(k)
    tokens, channels = q.shape[0] * q.shape[1], q.shape[-1]
    sizes = [q.shape[1], q.shape[2], k.shape[2], int(is_backward), tokens]
    text = program("rotary", q.dtype, f"CHANNELS={channels}", f"ROTATED={table.shape[-1]}")
    places: Tensor | int = 0 if positions is None else positions.contiguous()
    _launch(text, "rotary", tokens, [q, k, *table, places, *results, *sizes])
    return results


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) up, of the same shape and type."""
    if not kernels(gate, up):
        return functional.silu(gate) * up
    out: Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _swiglu_launch("forward", [gate, up], [torch.empty_like(gate)])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        results = [torch.empty_like(gate), torch.empty_like(up)]
        return tuple(_swiglu_launch("backward", [gradient.contiguous(), gate, up], results))


def _swiglu_launch(kernel: str, operands: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    n = results[0].numel()
    groups = -(-n // SWIGLU_GROUP_VALUES)
    _launch(program("swiglu", results[0].dtype), kernel, groups, [*operands, *results, n, groups])
    return results


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean of squares + epsilon) weight, over the last dim (arXiv:1910.07467)."""
    if not kernels(x, weight):
        compiling = torch.compiler.is_compiling()
        return (
            functional.rms_norm(x, weight.shape, weight, epsilon) if compiling else eager.rms_norm(x, weight, epsilon)
        )
    y: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return y


def added_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x + branch, and rms_norm of that, in one pass. Needs `kernels`."""
    both: tuple[Tensor, Tensor] = _AddedRmsNorm.apply(x, branch, weight, epsilon)  # type: ignore[no-untyped-call]
    return both


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        _launch_rows("forward", x, [x, 0, weight, 0, y], epsilon)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *_norm_gradients(x, weight, gradient, None, ctx.epsilon), None


class _AddedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        x, branch = x.contiguous(), branch.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(x)
        ctx.save_for_backward(total, weight)
        ctx.epsilon = epsilon
        _launch_rows("forward", x, [x, branch, weight, total, y], epsilon)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight = ctx.saved_tensors
        of_x, of_weight = _norm_gradients(total, weight, of_y, of_total.contiguous(), ctx.epsilon)
        return of_x, of_x, of_weight, None


def _norm_gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, of_sum: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, `of_sum` added, and of the weight."""
    gradient, of_x = gradient.contiguous(), torch.empty_like(x)
    width = weight.numel()
    beside: Tensor | int = 0 if of_sum is None else of_sum
    operands: list[Tensor | int] = [x, weight, gradient, beside, of_x]
    passes = _part_sums if width <= MOST_COLUMNS * STEP_VALUES else _wide_part_sums
    sums, of_weight = passes(operands, x, epsilon), torch.empty_like(weight)
    groups = -(-width // ADDED_COLUMNS)
    _launch(norm_program(x.dtype), "add_parts", groups, [sums, of_weight, len(sums), width, groups])
    return of_x, of_weight


def _part_sums(operands: Sequence[Tensor | int], x: Tensor, epsilon: float) -> Tensor:
    """Write the gradient of x; return the weight's, (parts, width) float32, summed over the rows of each part."""
    width = x.shape[-1]
    rows = x.numel() // width
    parts = -(-rows // PART_ROWS)
    sums = x.new_empty(parts, width, dtype=torch.float32)
    sizes = [width, _bits(epsilon), rows, PART_ROWS, parts]
    _launch(norm_program(x.dtype, width), "backward_rows", parts, [*operands, sums, *sizes])
    return sums


def _wide_part_sums(operands: Sequence[Tensor | int], x: Tensor, epsilon: float) -> Tensor:
    """Do what _part_sums does for rows of any width, in two passes."""
    width = x.shape[-1]
    rows = x.numel() // width
    parts = -(-rows // WIDE_PART_ROWS)
    scales, sums = (x.new_empty(*shape, dtype=torch.float32) for shape in ((rows,), (parts, width)))
    _launch_rows("backward", x, [*operands, scales], epsilon)
    groups = parts * -(-width // STEP_VALUES)
    arguments: list[Tensor | int] = [x, operands[2], scales, sums, rows, width, WIDE_PART_ROWS, groups]
    _launch(norm_program(x.dtype), "weight_gradient", groups, arguments)
    return sums


def norm_program(dtype: torch.dtype, width: int = 0) -> Program:
    """Return the text of RMSNorm's kernels; with a width, that of the backward pass of rows of about so many values."""
    if not width:
        return program("rows", dtype, parts=("rms_norm.cuh",))
    columns = -(-width // STEP_VALUES)
    return program("rows", dtype, f"COLUMNS={columns}", parts=("rms_norm.cuh", "rms_norm_rows.cuh"))


def _bits(epsilon: float) -> int:
    return int.from_bytes(struct.pack("<f", epsilon), "little")


def _launch_rows(kernel: str, x: Tensor, operands: Sequence[Tensor | int], epsilon: float) -> None:
    rows = x.numel() // x.shape[-1]
    arguments: list[Tensor | int] = [*operands, x.shape[-1], _bits(epsilon), rows]
    _launch(norm_program(x.dtype), kernel, rows, arguments)


def _launch(text: Program, kernel: str, groups: int, arguments: Sequence[Tensor | int]) -> None:
    first = arguments[0]
    assert isinstance(first, Tensor)
    launcher, why_none = launcher_of(first.device.type)
    assert launcher, why_none
    launcher.launch(text, kernel, groups, arguments)
