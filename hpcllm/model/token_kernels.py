"""Layers of a decoder for one more token of each of many texts, as one kernel that threads run side by side.

    thread 0   norm | q k v: its outputs | its heads: rotate, store, attend | output | norm | gate, up | down | norm ..
    thread 1   norm | ...                | ...                              | ...    | ...  | ...      | ...  | ...
                                         ^ all wait for all                 ^        ^                 ^      ^

The kernel finds weights, and the blocks of keys and values, by their addresses: a table with a line a layer, so that it
is compiled once for models of any depth. Hidden states are float32 whatever the weights are. Norms are so small that
each thread makes them for itself. Threads meet at a counter that each adds to.

Shapes: N texts, D hidden, H query heads, G key and value heads, K channels a head, F channels of the feed-forward half,
V vocabulary, R channels of a head that are rotated.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core.types import ExternalFunction
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpcllm.codecs.kernels import inner_kernel, narrowed, summing_kernel, widened
from hpcllm.model.few_rows import add_product
from hpcllm.model.paged_attention import attend_rows, exp_of
from hpcllm.model.tiles import TILE

Array = NDArray[Any]
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
ROOT_HALF, ROOT_2_PI, CUBIC = np.float32(0.5**0.5), np.float32((2 / math.pi) ** 0.5), np.float32(0.044715)
X_BYTES = 1 << 19  # of rows that are multiplied at once: a core's own cache holds them
SPINS = 2000  # looks at the counter, some microseconds, before a thread lets others run
RELEASED = 1 << 60  # of the counter: nobody waits any more
let_others_run = ExternalFunction("sched_yield", types.int32())

# columns of the table of addresses, 0 where there is nothing: norms and their biases; matrices, scales and biases
ATTENTION_NORM, FFN_NORM = 0, 2
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN = range(4, 25, 3)
KEYS, VALUES, COLUMNS = 25, 26, 27
FINAL_NORM, HEAD, END_COLUMNS = 0, 2, 5  # of the line for the head
GATED, GELU, GELU_TANH = range(3)
WHOLE_ROW = -1


class Shape(NamedTuple):
    """Numbers of a model that the kernel needs."""

    channels: int
    blocks: int  # of the cache
    block_tokens: int
    window: int
    group: int  # inputs of a matrix that share a scale; WHOLE_ROW, or 0: there are no scales
    activation: int  # GATED, GELU or GELU_TANH
    has_layernorm: bool
    is_parallel: bool  # both halves of a layer read its input
    epsilon: float


class Memory(NamedTuple):
    """Memory of a pass, float32, which threads share."""

    hidden: Array  # (N, D)
    query: Array  # (N, H K)
    key: Array  # (N, G K)
    value: Array  # (N, G K)
    attended: Array  # (N, H K)
    up: Array  # (N, F)
    gate: Array  # (N, F), or empty
    logits: Array  # (N, V); V = 0: without a head


class Where(NamedTuple):
    """Places of the new tokens."""

    tables: Array  # (N, most blocks) int32
    texts: Array  # (N,) int64: 0 1 2 ...
    positions: Array  # (N,) int64
    angles: Array  # (2, N, R) float32: cosines, and sines with the sign of their channel; R = 0: nothing is rotated


@summing_kernel
def run_layers(
    thread: int, threads: int, counter: Array, layers: Array, ends: Array, matrix: Array, plain: Array, shape: Shape,
    where: Where, memory: Memory,
) -> None:  # fmt: skip
    """Do one thread's part of all layers, and of the head: `hidden` and `logits` of the memory hold the results.

    counter: (1,) int64, 0 at the start. layers: (layers, COLUMNS), ends: (END_COLUMNS,) int64, addresses of what they
    name. matrix, plain: empty, of the elements of matrices, and of all else that the decoder holds (array_of).
    """
    hidden, turn = memory.hidden, 0
    normed, other = np.empty_like(hidden), np.empty_like(hidden)
    for layer in range(len(layers)):
        line = layers[layer]
        _normalise(hidden, line, ATTENTION_NORM, plain, shape, normed)
        if shape.is_parallel:
            _normalise(hidden, line, FFN_NORM, plain, shape, other)
        for column, out in ((QUERY, memory.query), (KEY, memory.key), (VALUE, memory.value)):
            _multiply(thread, threads, normed, line, column, matrix, plain, shape.group, False, out)
        turn = _meet(counter, threads, turn)
        _attend(thread, threads, line, plain, shape, where, memory)
        turn = _meet(counter, threads, turn)
        _multiply(thread, threads, memory.attended, line, OUTPUT, matrix, plain, shape.group, True, hidden)
        if not shape.is_parallel:
            turn = _meet(counter, threads, turn)
            _normalise(hidden, line, FFN_NORM, plain, shape, other)
        for column, out in ((UP, memory.up), (GATE, memory.gate)):
            if line[column]:
                _multiply(thread, threads, other, line, column, matrix, plain, shape.group, False, out)
        _activate(thread, threads, shape.activation, memory.gate, memory.up)
        turn = _meet(counter, threads, turn)
        _multiply(thread, threads, memory.up, line, DOWN, matrix, plain, shape.group, True, hidden)
        turn = _meet(counter, threads, turn)
    if memory.logits.shape[1]:
        _normalise(hidden, ends, FINAL_NORM, plain, shape, normed)
        _multiply(thread, threads, normed, ends, HEAD, plain, plain, 0, False, memory.logits)


@inner_kernel
def _share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """Return where a thread's share of so many outputs begins and ends: at multiples of a tile, or at the last one."""
    tiles = (count + TILE - 1) // TILE
    return TILE * (tiles * thread // threads), min(TILE * (tiles * (thread + 1) // threads), count)


@inner_kernel
def _multiply(
    thread: int, threads: int, x: Array, line: Array, column: int, matrix: Array, plain: Array, group: int, adds: bool,
    y: Array,
) -> None:  # fmt: skip
    inputs, outputs = x.shape[1], y.shape[1]
    groups = 0 if group == 0 else 1 if group == WHOLE_ROW else (inputs + group - 1) // group
    columns = groups * group // 2 if group > 0 else inputs
    weight = carray(_pointer(line[column], matrix), (outputs, columns))
    scales = carray(_pointer(line[column + 1], x), (outputs, groups))
    bias = carray(_pointer(line[column + 2], plain), (outputs if line[column + 2] else 0,))
    first, end = _share(outputs, thread, threads)
    rows = max(TILE, X_BYTES // (4 * inputs) // TILE * TILE)
    for n in range(0, len(x), rows):
        add_product(x[n : n + rows], weight, scales, bias, first, end, adds, y[n : n + rows])


@inner_kernel
def _normalise(x: Array, line: Array, column: int, plain: Array, shape: Shape, out: Array) -> None:
    channels = x.shape[1]
    weight = carray(_pointer(line[column], plain), (channels,))
    bias = carray(_pointer(line[column + 1], plain), (channels if line[column + 1] else 0,))
    epsilon, size = np.float32(shape.epsilon), np.float32(channels)
    for n in range(len(x)):
        row, result, mean, squares = x[n], out[n], ZERO, ZERO
        if shape.has_layernorm:
            for i in range(channels):
                mean += row[i]
            mean /= size
        for i in range(channels):
            squares += (row[i] - mean) * (row[i] - mean)
        factor = ONE / np.sqrt(squares / size + epsilon)
        for i in range(channels):
            result[i] = (row[i] - mean) * factor * widened(weight[i])
        for i in range(len(bias)):
            result[i] += widened(bias[i])


@inner_kernel
def _attend(thread: int, threads: int, line: Array, plain: Array, shape: Shape, where: Where, memory: Memory) -> None:
    """Rotate, store and attend for a thread's heads of keys and values, with the query heads that share them."""
    texts, groups, shared = len(memory.key), memory.key.shape[1] // shape.channels, memory.query.shape[1]
    shared //= memory.key.shape[1]
    first, end = texts * groups * thread // threads, texts * groups * (thread + 1) // threads
    query = memory.query.reshape((texts, groups * shared, shape.channels))
    place = (shape.blocks, groups, shape.block_tokens, shape.channels)
    keys, values = carray(_pointer(line[KEYS], plain), place), carray(_pointer(line[VALUES], plain), place)
    for item in range(first, end):
        n, head = item // groups, item % groups
        cosines, sines = where.angles[0, n], where.angles[1, n]
        key = memory.key[n, head * shape.channels : (head + 1) * shape.channels]
        value = memory.value[n, head * shape.channels : (head + 1) * shape.channels]
        _rotate(key, cosines, sines)
        for own in range(head * shared, (head + 1) * shared):
            _rotate(query[n, own], cosines, sines)
        block, at = where.tables[n, where.positions[n] // shape.block_tokens], where.positions[n] % shape.block_tokens
        for of, to in ((key, keys[block, head, at]), (value, values[block, head, at])):
            for c in range(shape.channels):
                to[c] = narrowed(of[c], to[c])
    out = memory.attended.reshape(query.shape)
    attend_rows(first, end, query, keys, values, where.tables, where.texts, where.positions, shape.window, out)


@inner_kernel
def _rotate(x: Array, cosines: Array, sines: Array) -> None:
    half = len(cosines) // 2
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i], x[half + i] = a * cosines[i] + b * sines[i], b * cosines[half + i] + a * sines[half + i]


@inner_kernel
def _activate(thread: int, threads: int, kind: int, gate: Array, up: Array) -> None:
    """Leave in `up` what the third matrix reads."""
    first, end = _share(up.shape[1], thread, threads)
    for n in range(len(up)):
        own, other = up[n, first:end], gate[n, first:end]
        if kind == GATED:
            for i in range(len(own)):
                own[i] *= _silu(other[i])
        elif kind == GELU:
            for i in range(len(own)):
                own[i] = HALF * own[i] * (ONE + np.float32(math.erf(own[i] * ROOT_HALF)))
        else:
            for i in range(len(own)):
                cubed = own[i] + CUBIC * own[i] * own[i] * own[i]
                own[i] = HALF * own[i] * (ONE + np.float32(math.tanh(ROOT_2_PI * cubed)))


@inner_kernel
def _silu(x: np.float32) -> np.float32:
    power = exp_of(-abs(x))
    return x * (ONE if x >= ZERO else power) / (ONE + power)


@inner_kernel
def _meet(counter: Array, threads: int, turn: int) -> int:
    """Wait until all threads have come here; returns the number of the next meeting."""
    if threads > 1:
        _arrive(counter)
        spins = 0
        while _arrivals(counter) < threads * (turn + 1):
            spins += 1
            if spins > SPINS:
                let_others_run()
    return turn + 1


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Take an address as that of elements of an array like this one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


def _counter_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, args[0]).data


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typing_context: Any, counter: Any) -> Any:  # noqa: ARG001
    """Add one to counter[0]; what this thread has written is there for whoever sees the sum."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _counter_of(context, builder, signature, args)
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def _arrivals(typing_context: Any, counter: Any) -> Any:  # noqa: ARG001
    """Read counter[0]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _counter_of(context, builder, signature, args)
        return builder.atomic_rmw("add", data, ir.Constant(ir.IntType(64), 0), "seq_cst")

    return types.int64(counter), generate
