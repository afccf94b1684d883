# ruff: noqa: N803 - shape suffixes are upper case; the legend is in the text below
"""Keys and values of the tokens that a generated text has so far, so that each new token costs one token's work.

    keys of block i    [ k0 k1 k2 ... k(length-1) | free ]      add: those of new tokens go behind, all come back

Shapes: B batch, S tokens in the cache, T new tokens, G key and value heads of this rank, K channels a head.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class KeyValueCache:
    """Of the blocks that one rank holds; memory is taken once."""

    def __init__(self, blocks: Iterable[int], shape: tuple[int, int, int, int], like: Tensor) -> None:
        """shape: (batch, tokens at most, key and value heads, channels a head), of the type and device of `like`."""
        self.length = 0  # tokens that every block has; set by the decoder once all of its blocks have added theirs
        self._memory = {block: like.new_empty(2, *shape) for block in blocks}

    def add(self, block: int, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append a block's new keys and values; returns all (B, S, G, K), the new ones last."""
        end = self.length + k_BTGK.shape[1]
        keys, values = self._memory[block][:, :, :end]
        keys[:, self.length :] = k_BTGK
        values[:, self.length :] = v_BTGK
        return keys, values
