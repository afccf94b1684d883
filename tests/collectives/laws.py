"""What tests of all collectives share: their inputs, which codecs and algorithms meet, how far a sum may be off."""

from __future__ import annotations

import numpy as np
import torch

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.catalogue import KINDS
from hpcllm.collectives import group_of
from hpcllm.collectives.strips import Grid
from hpcllm.mpi.wait import Waits

# where an array lies: in memory that the ranks of a node share, or not
PLACES = ["anywhere", "shared", "shared, further in", "shared, each elsewhere", "shared on some ranks"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MORE = [name for name in ("int8:32", "int8:sr", "int4:sr", "zfp:24") if name.partition(":")[0] in KINDS]
CODECS = [*KINDS, *MORE]
HALVES = [name for name in ("raw", "bf16", "int8", "int4:sr", "exp") if name.partition(":")[0] in KINDS]
PAIRS = [(name, torch.float32) for name in CODECS] + [(name, dtype) for name in HALVES for dtype in DTYPES[1:]]
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LIMIT_S = 60.0  # of a wait in these tests: a mistake must not hang, a compiler at work on the first call may
SINGLE = 2.0**-23  # rounding of fp32 arithmetic in a codec's own steps


def lengths(ranks: int) -> list[int]:
    """Nothing, fewer values than ranks, one more, just beside blocks and segments, several segments."""
    return [0, 1, ranks - 1, ranks + 1, 4099, 20011]


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """(n,) of many magnitudes, different on each rank."""
    scale = np.exp(np.random.default_rng(99).standard_normal(n))
    x = np.random.default_rng([rank, n]).standard_normal(n) * scale
    return torch.tensor(x, dtype=dtype)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).numpy()


def limited(comm):
    """comm, whose collectives raise StallError instead of hanging."""
    group_of(comm).wire.waits = Waits(LIMIT_S)
    return comm


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def same_everywhere(x: torch.Tensor, comm) -> bool:
    copies = comm.allgather(bits(x))
    return all(copy == copies[0] for copy in copies)


def two_step_bound(addends: list[np.ndarray], codec: Codec, dtype: torch.dtype) -> np.ndarray:
    """Each addend is encoded once, their sum is rounded to dtype and encoded once more."""
    off = sum(codec_bound(codec, addend) for addend in addends)
    return off + stored(addends, off, codec, dtype)


def grid_bound(addends: list[np.ndarray], codec: Codec, dtype: torch.dtype) -> np.ndarray:
    """Each addend is encoded once, each row's sum is rounded and encoded once, and so is the sum of all."""
    off, grid = np.zeros_like(addends[0]), Grid(len(addends))
    for number in range(grid.rows):
        row = addends[slice(*grid.row(number))]
        row_off = sum(codec_bound(codec, addend) for addend in row)
        off = off + row_off + stored(row, row_off, codec, dtype)
    return off + stored(addends, off, codec, dtype)


def hop_bound(addends: list[np.ndarray], codec: Codec, dtype: torch.dtype) -> np.ndarray:
    """Any partial sum may be encoded and stored, once for each rank that it meets, and so may the result."""
    off = np.zeros_like(addends[0])
    for _ in range(2 * len(addends)):
        off = off + stored(addends, off, codec, dtype)
    return off


def stored(addends: list[np.ndarray], off: np.ndarray, codec: Codec, dtype: torch.dtype) -> np.ndarray:
    """Rounding and encoding a partial sum, which is at most sum |addend| plus what it is off already.

    A bound grows with the values of a block, so that of the largest possible values holds for all partial sums.
    """
    largest = sum(np.abs(addend) for addend in addends) + off
    rounded = largest * (1.01 * ROUNDOFF[dtype] + len(addends) * SINGLE) + (6e-8 if dtype == torch.float16 else 0)
    return rounded + codec_bound(codec, largest + rounded)


def codec_bound(codec: Codec, x: np.ndarray) -> np.ndarray:
    if codec.lossless or not x.size:
        return np.zeros_like(x)
    # a sum's chunks start elsewhere than x does, so a value may share its block with any of its neighbours
    return np.maximum(codec.bound(x), neighbours(codec.bound(x), codec.block)) * (1 + SINGLE)


def neighbours(bound: np.ndarray, block: int) -> np.ndarray:
    """For each place the largest bound at most `block` away."""
    if block == 1:
        return bound
    padded = np.pad(bound, block, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * block + 1).max(axis=1)


def codec_for(name: str, dtype: torch.dtype) -> Codec:
    return find_codec(name, dtype)


def window_lengths(ranks: int) -> list[int]:
    """Besides the usual: just at the end of the single step, slices and chunks of several pages."""
    return [*lengths(ranks), 16 << 10, (16 << 10) + 1, 70_001]


def at(place: str, value: torch.Tensor, shared: torch.Tensor, rank: int) -> torch.Tensor:
    """The values as an array that lies in that place. shared: memory that the node shares."""
    start = {"shared, further in": 7, "shared, each elsewhere": 16 * rank}.get(place, 0)
    if place == "anywhere" or (place == "shared on some ranks" and rank % 2):
        return value.clone()
    return shared[start : start + value.numel()].copy_(value)
