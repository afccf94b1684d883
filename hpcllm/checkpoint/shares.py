"""Blocks shared out among ranks that could each do any of them, where no value has to travel. Pure.

rank 0   a[0] a[1] a[2] b[0]
rank 1                       b[1] c[0] c[1] c[2]      a contiguous stretch of the file each, about as many bytes
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.slabs import share

Block = tuple[str, int]  # dataset, and which of its blocks


def blocks_of(specs: Mapping[str, DatasetSpec]) -> list[Block]:
    """All blocks of all datasets, in the order of the file."""
    return [(name, index) for name in sorted(specs) for index in range(specs[name].blocks)]


def block_bytes(specs: Mapping[str, DatasetSpec], block: Block) -> int:
    """Of its values, whatever it takes in a file."""
    spec = specs[block[0]]
    return spec.block(*block).elements * spec.item_bytes


def my_blocks(specs: Mapping[str, DatasetSpec], rank: int, ranks: int) -> list[Block]:
    """A rank's share of them: no rank gets more than the mean and one block."""
    blocks = blocks_of(specs)
    mine = share([block_bytes(specs, block) for block in blocks], rank, ranks)
    return blocks[mine.start : mine.stop]
