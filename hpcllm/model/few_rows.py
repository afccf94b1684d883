"""Products of a few rows with a matrix, by kernels on the CPU: they cost what it takes to read the matrix, once.

    y (N, O) = x (N, I) w (O, I)^T + b (O,)

    N < 4     a row of w at a time, one sum for each row of x: memory is read in one stream, as fast as it comes
    else      tiles: 4 rows of x by 4 of w, 16 sums in registers, so that each number that is loaded is used four times;
              rows of x that are left over one by one

    w         float32, bf16, fp16     widened in registers
              int8                    the same; a row's sum is multiplied by its scale (quantised.py)
              4 bits                  N < 4: group by group; else 4 rows at a time are made whole, in the nearest cache

Two inputs that share a byte lie side by side, and vector registers want them apart: so x is put in order first, of each
group the first inputs of all bytes, then the second ones. Sums are in float32, in an order of the compiler's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from hpcllm.codecs.kernels import inner_kernel, widened
from hpcllm.codecs.quantise import high_code, low_code

Array = NDArray[Any]
ZERO, ONE = np.float32(0), np.float32(1)
TILE = 4


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
    sums = np.empty((len(x), TILE), np.float32)
    for o in range(first, end, TILE):
        last = min(o + TILE, end)
        _multiply(x, weight[o:last], sums)
        for j in range(last - o):
            factor = scales[o + j, 0] if scales.shape[1] else ONE
            _put(sums[:, j], factor, widened(bias[o + j]) if len(bias) else ZERO, adds, y[:, o + j])


@inner_kernel
def _add_packed(
    x: Array, weight: Array, scales: Array, bias: Array, first: int, end: int, adds: bool, y: Array
) -> None:
    half = weight.shape[1] // scales.shape[1]
    sums, whole = np.empty((len(x), TILE), np.float32), np.empty((TILE, 2 * weight.shape[1]), np.float32)
    ordered = _in_order(x, scales.shape[1], half)
    for o in range(first, end, TILE):
        last = min(o + TILE, end)
        if len(x) < TILE:
            for j in range(last - o):
                for n in range(len(x)):
                    sums[n, j] = _sum_of_groups(ordered[n], weight[o + j], scales[o + j], half)
        else:
            for j in range(last - o):
                _unpack(weight[o + j], scales[o + j], half, whole[j])
            _multiply(ordered, whole[: last - o], sums)
        for j in range(last - o):
            _put(sums[:, j], ONE, widened(bias[o + j]) if len(bias) else ZERO, adds, y[:, o + j])


@inner_kernel
def _put(sums: Array, factor: np.float32, bias: np.float32, adds: bool, y: Array) -> None:
    for n in range(len(y)):
        y[n] = sums[n] * factor + bias + (y[n] if adds else ZERO)


@inner_kernel
def _multiply(x: Array, weight: Array, sums: Array) -> None:
    """Multiply x (N, I) by rows of a weight (up to 4, I): sums (N, 4)."""
    tiled = len(x) - len(x) % TILE if len(weight) == TILE else 0
    for n in range(0, tiled, TILE):
        _tile(x[n : n + TILE], weight, sums[n : n + TILE])
    for j in range(len(weight)):
        for n in range(tiled, len(x)):
            sums[n, j] = _sum(x[n], weight[j])


@inner_kernel
def _sum(x: Array, w: Array) -> np.float32:
    total = ZERO
    for i in range(len(x)):
        total += x[i] * widened(w[i])
    return total


@inner_kernel
def _tile(x: Array, w: Array, y: Array) -> None:
    """Write the 16 sums of four rows with four; in variables of their own, which registers hold."""
    x0, x1, x2, x3, w0, w1, w2, w3 = x[0], x[1], x[2], x[3], w[0], w[1], w[2], w[3]
    y00 = y01 = y02 = y03 = y10 = y11 = y12 = y13 = y20 = y21 = y22 = y23 = y30 = y31 = y32 = y33 = ZERO
    for i in range(len(x0)):
        a, b, c, d = widened(w0[i]), widened(w1[i]), widened(w2[i]), widened(w3[i])
        own = x0[i]
        y00, y01, y02, y03 = y00 + own * a, y01 + own * b, y02 + own * c, y03 + own * d
        own = x1[i]
        y10, y11, y12, y13 = y10 + own * a, y11 + own * b, y12 + own * c, y13 + own * d
        own = x2[i]
        y20, y21, y22, y23 = y20 + own * a, y21 + own * b, y22 + own * c, y23 + own * d
        own = x3[i]
        y30, y31, y32, y33 = y30 + own * a, y31 + own * b, y32 + own * c, y33 + own * d
    y[0, 0], y[0, 1], y[0, 2], y[0, 3] = y00, y01, y02, y03
    y[1, 0], y[1, 1], y[1, 2], y[1, 3] = y10, y11, y12, y13
    y[2, 0], y[2, 1], y[2, 2], y[2, 3] = y20, y21, y22, y23
    y[3, 0], y[3, 1], y[3, 2], y[3, 3] = y30, y31, y32, y33


@inner_kernel
def _in_order(x: Array, groups: int, half: int) -> Array:
    """Put the inputs of each byte's low half before those of the high ones, group by group; zeros fill the last one."""
    ordered = np.zeros((len(x), groups * 2 * half), np.float32)
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
