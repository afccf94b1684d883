"""One more token of each of many texts through a decoder on the CPU, in one call of a kernel a thread.

    decoder, cache --once--> addresses of weights and blocks --+
                                                               +--> token_kernels.run_layers --> logits, hidden states
    tokens, tables, positions of a pass -----------------------+

A token of a model that a laptop holds takes milliseconds, of which PyTorch's operators would take a good part only to
be called: some thirty a layer. What is computed is what Decoder.hidden_states and Decoder.logits say, which serve what
this does not: prompts, devices, ranks that share a layer, adapters.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpcllm.codecs.kernels import array_of, run_in_threads
from hpcllm.model.linear import Linear
from hpcllm.model.paged_cache import BLOCK_TOKENS, PagedCache
from hpcllm.model.shapes import UnshardHooks
from hpcllm.model.tiles import HAS_BF16
from hpcllm.model.token_kernels import (
    ATTENTION_NORM,
    COLUMNS,
    DOWN,
    END_COLUMNS,
    FFN_NORM,
    FINAL_NORM,
    GATE,
    GATED,
    GELU,
    GELU_TANH,
    HEAD,
    KEY,
    KEYS,
    OUTPUT,
    QUERY,
    RELEASED,
    UP,
    VALUE,
    VALUES,
    WHOLE_ROW,
    Memory,
    Shape,
    Where,
    run_layers,
)  # fmt: skip
from hpcllm.model.transformer import Block, Decoder
from hpcllm.system.hardware.node import multiplies

MOST_TEXTS_OF_16_BIT = 3  # where the cores multiply such numbers by themselves, which these kernels do not ask them to
ACTIVATIONS = {"swiglu": GATED, "gelu": GELU, "gelu_tanh": GELU_TANH}
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_one_pass_at_a_time = threading.Lock()  # two that each had some of the threads would wait for ever


class TokenPass:
    """A decoder and its cache, as the kernel takes them. Values may change between passes, memory may not."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        """decoder: one that `suits` is true of."""
        self.decoder, self.cache, model = decoder, cache, decoder.model
        layers = [_line(decoder.blocks[str(n)], keys, values) for n, (keys, values) in cache.arrays.items()]  # type: ignore[arg-type]
        self._layers, self._ends = np.array(layers, np.int64), np.zeros(END_COLUMNS, np.int64)
        if decoder.span.has_head:
            _put_vectors(self._ends, FINAL_NORM, decoder.final_norm)
            self._ends[HEAD] = decoder.head_weight.data_ptr()
        self._plain = array_of(torch.empty(0, dtype=decoder.dtype))
        held = next(iter(decoder.quantised.values()), None)
        self._matrix = self._plain if held is None else np.empty(0, np.int8 if held.bits == 8 else np.uint8)
        word = WORDS.get(decoder.dtype, "fp32") if held is None else "fp32"
        asks = word == "fp32" or (word == "bf16" and HAS_BF16)
        self.most_texts = math.inf if asks or not multiplies(word) else MOST_TEXTS_OF_16_BIT
        group = 0 if held is None else WHOLE_ROW if held.bits == 8 else held.group
        self._shape = Shape(
            channels=model.head_dim, blocks=len(next(iter(cache.arrays.values()))[0]), block_tokens=BLOCK_TOKENS,
            window=model.window, group=group, activation=ACTIVATIONS[model.activation],
            has_layernorm=model.norm == "layernorm", is_parallel=model.parallel_residual, epsilon=model.norm_epsilon,
        )  # fmt: skip

    def run(self, x: Tensor, tables: NDArray[np.int32], positions: NDArray[np.int64]) -> Tensor:
        """Pass one token of each text: returns logits (N, V) float32 with the head, else (N, hidden) of x's type.

        x: (N,) int64 with the embedding, else (N, hidden) of the stage before. tables: (N, most blocks), with a block
        for the new token; positions: (N,), of it.
        """
        with one_thread():
            memory = self._memory(x, positions)
        where = Where(tables, np.arange(len(x)), positions, self._angles(positions))
        threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        counter = np.zeros(1, np.int64)

        def part(thread: int, _end: int) -> None:
            run_layers(
                thread, threads, counter, self._layers, self._ends, self._matrix, self._plain, self._shape, where,
                memory,
            )  # fmt: skip

        with _one_pass_at_a_time:
            try:
                run_in_threads(part, threads, 1)
            except BaseException:  # an interruption before this thread's part began: the others would wait for it
                counter[0] = RELEASED
                raise
        result = torch.from_numpy(memory.logits if self.decoder.span.has_head else memory.hidden)
        return result if self.decoder.span.has_head else result.to(self.decoder.dtype)

    def _memory(self, x: Tensor, positions: NDArray[np.int64]) -> Memory:
        model, decoder, n = self.decoder.model, self.decoder, len(x)
        if decoder.span.has_embedding:
            x = functional.embedding(x, decoder.embedding.weight)
            if model.positions == "learned":
                x = x + decoder.positions.weight[torch.from_numpy(positions)]
        hidden = x.float() if x.dtype != torch.float32 else x.clone()
        queries, keys = model.heads * model.head_dim, model.key_value_heads * model.head_dim
        gate = model.ffn * (model.activation == "swiglu")
        sizes = queries, keys, keys, queries, model.ffn, gate, model.vocabulary * decoder.span.has_head
        return Memory(hidden.detach().numpy(), *(np.empty((n, size), np.float32) for size in sizes))

    def _angles(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        table = self.decoder.table
        if table is None:
            return np.empty((2, len(positions), 0), np.float32)
        return np.ascontiguousarray(table.numpy()[:, positions, 0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch's operators run in this thread alone.

    After one that had more, those go on looking for work for some milliseconds, on the cores that a pass needs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def suits(decoder: Decoder) -> bool:
    """True if one process has the layers of a decoder, on the CPU, as they were trained: without adapters."""
    if not (decoder.device.type == "cpu" and decoder.tp.size == 1 and type(decoder.unshard_hooks) is UnshardHooks):
        return False
    layers = [layer for layer in decoder.blocks.modules() if isinstance(layer, Linear)]
    if held := [layer.quantised for layer in layers if layer.quantised and layer.adapter_a is None]:
        return len(held) == len(layers) and all(each.bits == 4 or each.group == each.shape[1] for each in held)
    return all(layer.weights.is_plain(decoder.dtype) and layer.weight.is_contiguous() for layer in layers)


def _line(block: Block, keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the addresses of a layer."""
    line = np.zeros(COLUMNS, np.int64)
    attention, ffn = block.attention, block.ffn
    _put_vectors(line, ATTENTION_NORM, block.attention_norm)
    _put_vectors(line, FFN_NORM, block.ffn_norm)
    matrices = {QUERY: attention.query, KEY: attention.key, VALUE: attention.value, OUTPUT: attention.output}
    for column, layer in (matrices | {GATE: ffn.gate, UP: ffn.up, DOWN: ffn.down}).items():
        if layer is not None:
            bias = 0 if layer.bias is None else layer.bias.data_ptr()
            parts = layer.quantised.parts if layer.quantised else (layer.weight, None)
            scales = 0 if parts[1] is None else parts[1].data_ptr()
            line[column : column + 3] = parts[0].data_ptr(), scales, bias
    line[KEYS], line[VALUES] = keys.ctypes.data, values.ctypes.data
    return line


def _put_vectors(line: NDArray[np.int64], column: int, norm: nn.Module) -> None:
    bias = getattr(norm, "bias", None)
    line[column : column + 2] = norm.weight.data_ptr(), 0 if bias is None else bias.data_ptr()  # type: ignore[operator]
