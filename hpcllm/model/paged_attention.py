"""Attention of new tokens to keys and values that lie in blocks, by kernels on the CPU.

    table of a text   7 2 9          block 7 [ t0 .. t15 ]  block 2 [ t16 .. t31 ]  block 9 [ t32 t33 |  free  ]

    one row           q ------- scores, block by block -- softmax -- values, block by block --> out
                      rows do not know of one another: what a text gets does not depend on its neighbours

A row is one new token and one head of keys and values, with the query heads that share it: a block is read from memory
once for all of them. Sums over channels and tokens are in float32 and in an order of the compiler's, the same for each
row. exp is a polynomial (a relative error of 2e-7), because a loop with a call to the library's is not vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.codecs.kernels import float_of, inner_kernel, kernel, narrowed, run_in_threads, summing_kernel, widened

Array = NDArray[Any]
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
LEAST = np.float32(-87)  # below, exp is no normal number
HALF, ONE = np.float32(0.5), np.float32(1)
P2, P3, P4, P5, P6 = (np.float32(1 / divisor) for divisor in (2, 6, 24, 120, 720))
ROWS_A_THREAD = 8


@kernel
def store_rows(new: Array, memory: Array, tables: Array, texts: Array, positions: Array) -> None:
    """Write new (N, G, K) to their places in memory (blocks, G, block, K). texts, positions: (N,), of each token."""
    size = memory.shape[2]
    for row in range(len(new)):
        block, place = tables[texts[row], positions[row] // size], positions[row] % size
        for head in range(new.shape[1]):
            to, of = memory[block, head, place], new[row, head]
            for c in range(len(of)):
                to[c] = of[c]


def attend(
    q: Array, keys: Array, values: Array, tables: Array, texts: Array, positions: Array, window: int, out: Array
) -> None:
    """Attend from q (N, H, K) to the tokens up to each one's own, `window` at most, 0: all; writes out (N, H, K).

    keys, values: (blocks, G, block, K); tables: (texts, most blocks) int32; texts, positions: (N,) int64.
    """

    def part(first: int, end: int) -> None:
        attend_rows(first, end, q, keys, values, tables, texts, positions, window, out)

    run_in_threads(part, len(q) * keys.shape[1], ROWS_A_THREAD)


@kernel
def exp_of(x: np.float32) -> np.float32:
    """Return exp(x) of x <= 0."""
    x = max(x, LEAST)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN_2_HIGH - n * LN_2_LOW
    power = ONE + r * (ONE + r * (P2 + r * (P3 + r * (P4 + r * (P5 + r * P6)))))
    result: np.float32 = power * float_of(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return result


@summing_kernel
def attend_rows(
    first: int, end: int, q: Array, keys: Array, values: Array, tables: Array, texts: Array, positions: Array,
    window: int, out: Array,
) -> None:  # fmt: skip
    heads, channels = keys.shape[1], keys.shape[3]
    shared = q.shape[1] // heads
    scores = np.empty((shared, tables.shape[1] * keys.shape[2]), np.float32)
    query, total = np.empty((shared, channels), np.float32), np.empty((shared, channels), np.float32)
    factor = ONE / np.sqrt(np.float32(channels))
    for item in range(first, end):
        row, head = item // heads, item % heads
        table, last = tables[texts[row]], positions[row] + 1
        start = max(last - window, 0) if window else 0
        own, result = q[row, head * shared : (head + 1) * shared], out[row, head * shared : (head + 1) * shared]
        for h in range(shared):
            for c in range(channels):
                query[h, c] = widened(own[h, c]) * factor
        _score(query, keys, table, head, start, last, scores)
        for h in range(shared):
            _softmax(scores[h, start:last])
        total[:] = np.float32(0)
        _add_values(scores, values, table, head, start, last, total)
        for h in range(shared):
            for c in range(channels):
                result[h, c] = narrowed(total[h, c], result[h, c])


@inner_kernel
def _score(query: Array, keys: Array, table: Array, head: int, start: int, last: int, scores: Array) -> None:
    size = keys.shape[2]
    for place in range(start // size, (last + size - 1) // size):
        block, before = keys[table[place], head], place * size
        for h in range(len(query)):
            own, found = query[h], scores[h]
            for t in range(max(start, before), min(last, before + size)):
                key, score = block[t - before], np.float32(0)
                for c in range(len(own)):
                    score += own[c] * widened(key[c])
                found[t] = score


@inner_kernel
def _add_values(scores: Array, values: Array, table: Array, head: int, start: int, last: int, total: Array) -> None:
    size = values.shape[2]
    for place in range(start // size, (last + size - 1) // size):
        block, before = values[table[place], head], place * size
        for h in range(len(total)):
            weights, sums = scores[h], total[h]
            for t in range(max(start, before), min(last, before + size)):
                value, weight = block[t - before], weights[t]
                for c in range(len(sums)):
                    sums[c] += weight * widened(value[c])


@inner_kernel
def _softmax(scores: Array) -> None:
    largest = scores[0]
    for t in range(len(scores)):
        largest = max(largest, scores[t])
    total = np.float32(0)
    for t in range(len(scores)):
        scores[t] = exp_of(scores[t] - largest)
    for t in range(len(scores)):
        total += scores[t]
    factor = ONE / total
    for t in range(len(scores)):
        scores[t] *= factor
