"""Products of a few rows with a matrix, by kernels on the CPU: they cost what it takes to read the matrix, once.

    y (N, O) = x (N, I) w (O, I)^T + b (O,)

    N < 4     a row of w at a time: memory is read in one stream, as fast as it comes
    else      four rows of w at a time, with rows of x four by four, and what is left one by one: tiles.py

    w         float32, bf16, fp16     as they lie
              int8                    the same, always by fours; a row's sums are multiplied by its scale (quantised.py)
              4 bits                  N < 4: group by group; else four rows are made whole, in the nearest cache

Two inputs that share a byte lie side by side, and vector registers want them apart: so x is put in order first, of each
group the first inputs of all bytes, then the second ones. Rows that do not fill the registers are copied with zeros
behind them. Sums are in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from hpcllm.codecs.kernels import inner_kernel, narrowed, widened
from hpcllm.codecs.quantise import high_code, low_code
from hpcllm.model.tiles import HAS_BF16, STEP, TILE, multiply_four, multiply_one, multiply_pair

Array = NDArray[Any]
ZERO, ONE = np.float32(0), np.float32(1)


def add_product(
    x: Array, weight: Array, scales: Array, bias: Array, first: int, end: int, adds: bool, y: Array
) -> None:
    """Write outputs first to end of a product to y (N, O), or add them to what is there. For kernels alone.

    x (N, I) float32; weight (O, I), or (O, groups x 32) uint8 with two inputs in each; scales (O, groups), of a
    floating-point weight (O, 0); bias (O,), or empty.
    """


@overload(add_product)  # type: ignore[untyped-decorator]
def _of_a_kind(x: Any, weight: Any, scales: Any, bias: Any, first: Any, end: Any, adds: Any, y: Any) -> Any:  # noqa: ARG001
    chosen = _add_packed if weight.dtype == types.uint8 else _add_plain

    def call(x: Any, weight: Any, scales: Any, bias: Any, first: Any, end: Any, adds: Any, y: Any) -> Any:
        chosen(x, weight, scales, bias, first, end, adds, y)

    return call


@inner_kernel
def _add_plain(x: Array, weight: Array, scales: Array, bias: Array, first: int, end: int, adds: bool, y: Array) -> None:
    own, sums = _as_multiplied(x, weight), np.empty((len(x), TILE), np.float32)
    inputs = weight.shape[1]
    fits, spare = inputs % STEP == 0, np.zeros((TILE, own.shape[1]), weight.dtype)
    for o in range(first, end, TILE):
        if fits and o + TILE <= end:
            _multiply(own, weight[o : o + TILE], sums)
        else:
            for j in range(min(TILE, end - o)):
                spare[j, :inputs] = weight[o + j]
            _multiply(own, spare, sums)
        _put(sums, scales, bias, o, min(o + TILE, end), adds, y)


@inner_kernel
def _add_packed(
    x: Array, weight: Array, scales: Array, bias: Array, first: int, end: int, adds: bool, y: Array
) -> None:
    half = weight.shape[1] // scales.shape[1]
    ordered, sums = _in_order(x, scales.shape[1], half), np.empty((len(x), TILE), np.float32)
    whole = np.zeros((TILE, ordered.shape[1]), np.float32)
    for o in range(first, end, TILE):
        last = min(o + TILE, end)
        if len(x) < TILE:
            for j in range(last - o):
                for n in range(len(x)):
                    sums[n, j] = _sum_of_groups(ordered[n], weight[o + j], scales[o + j], half)
        else:
            for j in range(last - o):
                _unpack(weight[o + j], scales[o + j], half, whole[j])
            _multiply(ordered, whole, sums)
        _put(sums, scales[:, :0], bias, o, last, adds, y)


@inner_kernel
def _put(sums: Array, scales: Array, bias: Array, first: int, end: int, adds: bool, y: Array) -> None:
    for n in range(len(y)):
        for o in range(first, end):
            value = sums[n, o - first] * (scales[o, 0] if scales.shape[1] else ONE)
            y[n, o] = value + (widened(bias[o]) if len(bias) else ZERO) + (y[n, o] if adds else ZERO)


@inner_kernel
def _multiply(x: Array, w: Array, sums: Array) -> None:
    """Multiply x (N, I) by four rows w (4, I): sums (N, 4). The same bits, whichever way."""
    if len(x) < TILE and w.itemsize > 1:
        for j in range(TILE):
            for n in range(len(x)):
                multiply_pair(x[n : n + 1], w[j : j + 1], sums[n : n + 1, j : j + 1])
        return
    tiled = len(x) - len(x) % TILE
    for n in range(0, tiled, TILE):
        multiply_four(x[n : n + TILE], w, sums[n : n + TILE])
    for n in range(tiled, len(x)):
        multiply_one(x[n : n + 1], w, sums[n : n + 1])


@inner_kernel
def _padded(inputs: int) -> int:
    return (inputs + STEP - 1) // STEP * STEP


def _as_multiplied(x: Array, weight: Array) -> Array:  # type: ignore[empty-body]
    """Return x as it is multiplied with a weight, with zeros behind it: in bf16 where the machine multiplies that."""


@overload(_as_multiplied)  # type: ignore[untyped-decorator]
def _form_of_a_kind(x: Any, weight: Any) -> Any:  # noqa: ARG001
    def narrow(x: Any, weight: Any) -> Any:  # noqa: ARG001
        rounded = np.zeros((len(x), _padded(x.shape[1])), np.uint16)
        for n in range(len(x)):
            for i in range(x.shape[1]):
                rounded[n, i] = narrowed(x[n, i], rounded[n, i])
        return rounded

    def fill(x: Any, weight: Any) -> Any:  # noqa: ARG001
        if x.shape[1] % STEP == 0:
            return x
        filled = np.zeros((len(x), _padded(x.shape[1])), np.float32)
        filled[:, : x.shape[1]] = x
        return filled

    return narrow if HAS_BF16 and weight.dtype == types.uint16 else fill


@inner_kernel
def _in_order(x: Array, groups: int, half: int) -> Array:
    """Put the inputs of each byte's low half before those of the high ones, group by group; zeros fill the last one."""
    ordered = np.zeros((len(x), _padded(groups * 2 * half)), np.float32)
    for n in range(len(x)):
        for i in range(x.shape[1]):
            group, place = i // (2 * half), i % (2 * half)
            ordered[n, group * 2 * half + place % 2 * half + place // 2] = x[n, i]
    return ordered


@inner_kernel
def _sum_of_groups(x: Array, codes: Array, scales: Array, half: int) -> np.float32:
    total = ZERO
    for group in range(len(scales)):
        code = codes[group * half : (group + 1) * half]
        low, high = x[2 * group * half : (2 * group + 1) * half], x[(2 * group + 1) * half : 2 * (group + 1) * half]
        part = ZERO
        for i in range(len(code)):
            part += low_code(code[i]) * low[i] + high_code(code[i]) * high[i]
        total += part * scales[group]
    return total


@inner_kernel
def _unpack(codes: Array, scales: Array, half: int, values: Array) -> None:
    for group in range(len(scales)):
        code, scale = codes[group * half : (group + 1) * half], scales[group]
        low = values[2 * group * half : (2 * group + 1) * half]
        high = values[(2 * group + 1) * half : 2 * (group + 1) * half]
        for i in range(len(code)):
            low[i] = low_code(code[i]) * scale
            high[i] = high_code(code[i]) * scale
