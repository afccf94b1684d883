# ruff: noqa: N803, N806 - shape suffixes are upper case; the legend is in the text below
"""Keys and values of many texts of unequal lengths, in blocks of one size that are handed out as texts grow.

    pool      [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ] ...       a block: 16 tokens of each layer of this rank
    table     text a:  4 1 6     40 tokens: two blocks and a half
              text b:  0         3 tokens
    free      2 3 5 ...          a text that ends gives its blocks back

Memory is taken once and never moved; less than a block a text is wasted. One pass reads new tokens of several texts,
side by side as one row (1, N): their keys and values go to the blocks of their texts, then each token looks at those up
to its own. Texts that are read from their beginning attend as documents of a row do (documents.py), without a way
through the blocks.

Source of the blocks: arXiv:2309.06180 section 4. Shapes: N new tokens of a pass, H query heads, G key and value heads,
K channels a head; heads are those of this rank, where tp splits them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcllm.codecs.kernels import array_of
from hpcllm.model import paged_attention
from hpcllm.model.documents import Causal, Documents, plan_attention

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens of one text."""
    return math.ceil(tokens / BLOCK_TOKENS)


class BlockPool:
    """Numbers of the blocks that are free; most_used: most that ever were not."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self._free, self.most_used = blocks, list(range(blocks))[::-1], 0

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, table: list[int], tokens: int, spare: int = 0) -> bool:
        """Add blocks to a text's table until it holds so many tokens, if so many more than these are free.

        Returns False, with nothing added, if they are not.
        """
        missing = blocks_for(tokens) - len(table)
        if missing + spare > self.free:
            return False
        table.extend(self._free.pop() for _ in range(missing))
        self.most_used = max(self.most_used, self.blocks - self.free)
        return True

    def give_back(self, table: list[int]) -> None:
        """Free the blocks of a text, whose table is empty then."""
        self._free.extend(reversed(table))
        table.clear()


def side_by_side(tables: Sequence[list[int]]) -> NDArray[np.int32]:
    """Return tables of blocks as (texts, most blocks), zeros behind the shorter ones."""
    width = max(map(len, tables))
    return np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32)


class PagedCache:
    """Memory for the blocks of all texts, in the layers that one rank holds."""

    def __init__(self, layers: Iterable[int], blocks: int, heads: int, channels: int, like: Tensor) -> None:
        """Allocate memory of the type and device of `like`. heads: of keys and values, G."""
        shape = (2, blocks, heads, BLOCK_TOKENS, channels)
        # on a device masked places are read too, and 0 times what lies there must be 0
        new = like.new_empty if like.is_cpu else like.new_zeros
        self.memory = {layer: new(shape) for layer in layers}
        self.on_cpu = like.is_cpu
        self.arrays = {layer: array_of(x) for layer, x in self.memory.items()} if self.on_cpu else {}


class CachedPass:
    """New tokens of several texts, and where their keys and values lie. The same for all layers of a pass."""

    def __init__(
        self, cache: PagedCache, starts: Sequence[int], counts: Sequence[int], tables: Sequence[list[int]], window: int
    ) -> None:
        """starts: tokens of each text that the cache has; counts: new ones, 1 at least; tables: their blocks, for both.

        window: of the model.
        """
        self.cache, self.window = cache, window
        like = next(iter(cache.memory.values()))
        device = like.device
        lengths = np.array(counts, np.int64)
        self._texts = np.repeat(np.arange(len(lengths)), lengths)
        first_rows = np.cumsum(lengths) - lengths
        self._positions = np.arange(len(self._texts)) - np.repeat(first_rows - np.array(starts, np.int64), lengths)
        self._tables = side_by_side(tables)
        self.last_rows = torch.from_numpy(first_rows + lengths - 1).to(device)
        self.documents = Documents(lengths, torch.from_numpy(self._positions).unsqueeze(0).to(device))
        begins = not any(starts) and any(count > 1 for count in counts)
        self._plan = plan_attention(self.documents, window, eager=True, like=like) if begins else None
        self._on_device = None if cache.on_cpu else self._addresses(device)

    def attend(self, layer: int, causal: Causal, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
        """Store keys and values (1, N, G, K) and attend with q (1, N, H, K): returns (1, N, H, K).

        causal: attention.causal_attention.
        """
        store, read = (self._store, self._read) if self.cache.on_cpu else (self._store_on_device, self._read_on_device)
        store(layer, k_BTGK, v_BTGK)
        if self._plan is not None:
            return self._plan.attend(causal, q_BTHK, k_BTGK, v_BTGK, self.window)
        return read(layer, q_BTHK)

    def _store(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> None:
        for memory, new in zip(self.cache.arrays[layer], (k_BTGK, v_BTGK), strict=True):
            paged_attention.store_rows(array_of(new)[0], memory, self._tables, self._texts, self._positions)

    def _read(self, layer: int, q_BTHK: Tensor) -> Tensor:
        out = torch.empty_like(q_BTHK, memory_format=torch.contiguous_format)
        keys, values = self.cache.arrays[layer]
        where = self._tables, self._texts, self._positions
        paged_attention.attend(array_of(q_BTHK)[0], keys, values, *where, self.window, array_of(out)[0])
        return out

    def _addresses(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the block and the place in it of each new token, the tables by token, and where each token looks."""
        tables = torch.from_numpy(self._tables[self._texts]).long()
        positions = torch.from_numpy(self._positions).unsqueeze(1)
        seen = torch.arange(tables.shape[1] * BLOCK_TOKENS)
        looks = (seen <= positions) & (seen > positions - self.window if self.window else seen >= 0)
        blocks = tables.gather(1, positions // BLOCK_TOKENS)
        moved = (x.to(device) for x in (blocks[:, 0], positions[:, 0] % BLOCK_TOKENS, tables, looks[:, None, None]))
        block, place, by_token, where = moved
        return block, place, by_token, where

    def _store_on_device(self, layer: int, k_BTGK: Tensor, v_BTGK: Tensor) -> None:
        assert self._on_device is not None
        block, place, _, _ = self._on_device
        for memory, new in zip(self.cache.memory[layer], (k_BTGK, v_BTGK), strict=True):
            memory[block, :, place] = new[0]

    def _read_on_device(self, layer: int, q_BTHK: Tensor) -> Tensor:
        assert self._on_device is not None
        _, _, tables, looks = self._on_device
        k_NGSK, v_NGSK = (x[tables].transpose(1, 2).flatten(2, 3) for x in self.cache.memory[layer])
        q_NGHK = q_BTHK.view(*q_BTHK.shape[1:2], k_NGSK.shape[1], -1, q_BTHK.shape[3])  # heads that share keys
        out = torch.nn.functional.scaled_dot_product_attention(q_NGHK, k_NGSK, v_NGSK, attn_mask=looks)
        return out.flatten(1, 2).unsqueeze(0)
