"""Values that are sent, what must come out, and how far from it a result is.

    value(rank, i) = pattern(rank)[i mod PERIOD]         pattern: normal x a scale for each 256 values, log-normal

Gradient-like values that any rank can compute for any other: neighbouring gradients of one row are alike in size and
rows differ by orders of magnitude, hence the scales. Another rank has another pattern. PERIOD is prime, so that chunks,
blocks and segments, which have round sizes, never repeat it: a chunk in another's place is seen. Sums have the same
period, so the exact result of any size is known from one float64 sum over the patterns, with no message sent and no
second array.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.codecs import Codec, find_codec
from hpcllm.mpi import buffers
from hpcllm.mpi.wait import job_waits

PERIOD = 262_139
SCALE_RUN = 256  # values of one scale
SCALE = 1e-3
SEED = 31

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Segment:
    """Part of a result: count values of a periodic pattern from `start`, and how far from it they may be."""

    exact: Floats  # (PERIOD,)
    allowed: Callable[[], Floats]  # () -> (PERIOD,); takes its time, called by --check alone
    start: int
    count: int


@lru_cache(maxsize=8)
def pattern(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of a rank, (PERIOD,) of dtype."""
    random = np.random.default_rng([SEED, rank])
    scales = SCALE * np.exp(random.standard_normal(-(-PERIOD // SCALE_RUN))).astype("f4")
    values = random.standard_normal(PERIOD, dtype="f4") * np.repeat(scales, SCALE_RUN)[:PERIOD]
    return torch.from_numpy(values).to(dtype)


def unroll(source: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill out[i] = source[(start + i) mod period]."""
    done, period = 0, source.numel()
    while done < out.numel():
        first = (start + done) % period
        step = min(period - first, out.numel() - done)
        out[done : done + step].copy_(source[first : first + step])
        done += step


def expected(operation: str, size: int, rank: int, ranks: int, codec: Codec, algorithm: str) -> Iterator[Segment]:
    """The exact result on `rank`, front to back. size: values, counted as the sizes of arguments.py."""
    if operation in ("allreduce", "reduce_scatter"):
        start, end = (size * r // ranks for r in (rank, rank + 1)) if operation == "reduce_scatter" else (0, size)
        exact = sums(ranks, codec.dtype)[0]
        yield Segment(exact, lambda: allowed_sum(ranks, codec.name, codec.dtype, algorithm), start, end - start)
        return
    for source in [0] if operation in ("broadcast", "p2p") else range(ranks):
        exact = pattern(source, codec.dtype).double().numpy()
        start = rank * size if operation == "alltoall" else 0
        yield Segment(exact, lambda source=source: allowed_copy(source, codec), start, size)  # type: ignore[misc]


@lru_cache(maxsize=1)
def sums(ranks: int, dtype: torch.dtype) -> tuple[Floats, Floats]:
    """float64 sums over the ranks of value and |value|."""
    total, size = np.zeros(PERIOD), np.zeros(PERIOD)
    for rank in range(ranks):
        values = pattern(rank, dtype).double().numpy()
        total += values
        size += np.abs(values)
    return total, size


@lru_cache(maxsize=16)
def allowed_sum(ranks: int, name: str, dtype: torch.dtype, algorithm: str) -> Floats:
    """Largest distance from the exact sum that a result may have, (PERIOD,).

    Each rounding of partial sums costs at most the sum of what rounding the addends would: twice that where scales are
    powers of two. A ring rounds once a hop; all else at most once a doubling, once the folded ranks, once the sum.
    """
    roundings = ranks + 1 if algorithm == "ring" else (ranks - 1).bit_length() + 2
    codec, codes = find_codec(name, dtype), np.zeros(PERIOD)
    for rank in range(ranks):
        codes += _bound_anywhere(rank, codec)
    size = sums(ranks, dtype)[1] + codes
    allowed: Floats = roundings * (2 * codes + _storing(size, dtype)) + ranks * _storing(size, torch.float32)
    return allowed


def allowed_copy(source: int, codec: Codec) -> Floats:
    """Largest distance from the sent values that received ones may have, encoded once, (PERIOD,)."""
    if codec.lossless:
        return np.zeros(PERIOD)
    codes = _bound_anywhere(source, codec)
    return codes + _storing(np.abs(pattern(source, codec.dtype).double().numpy()) + codes, codec.dtype)


def _storing(size: Floats, dtype: torch.dtype) -> Floats:
    """Twice the largest error of rounding numbers of that size to dtype."""
    kind = torch.finfo(dtype)
    costs: Floats = kind.eps * np.maximum(size, kind.smallest_normal)
    return costs


@cache
def codec_ratio(name: str, dtype: torch.dtype) -> float:
    """Bytes without the codec over bytes with it, of one pattern."""
    codec, values = find_codec(name, dtype), pattern(0, dtype)
    used = codec.encode(values, torch.empty(codec.encoded_bytes(PERIOD), dtype=torch.uint8))
    return values.nbytes / used.numel()


def _bound_anywhere(rank: int, codec: Codec) -> Floats:
    """The codec's bound with its blocks at any place: of the largest value less than a block away on either side."""
    width, largest = 1, np.abs(pattern(rank, codec.dtype).double().numpy())
    while width < codec.block:  # largest[i]: of the `width` values from i
        step = min(width, codec.block - width)
        largest = np.maximum(largest, np.roll(largest, -step))
        width += step
    bounds: Floats = codec.bound(np.maximum(largest, np.roll(largest, codec.block - 1)))
    return bounds


PIECE = 1 << 20  # values compared at once, in float64


@dataclass
class Distance:
    """Distance between results and exact results."""

    error: float = 0.0  # sum of squares
    exact: float = 0.0  # sum of squares
    outside: int = 0  # values further off than allowed

    @property
    def relative(self) -> float:
        """L2 norm of the error over that of the exact result; NaN or infinite where a value was."""
        return math.sqrt(self.error / self.exact) if self.exact else math.sqrt(self.error)


def distance(result: torch.Tensor, segments: Iterable[Segment], comm: MPI.Intracomm, check: bool) -> Distance:
    """Distance of all ranks' results together. result: (n,), on the CPU. Collective over comm."""
    own, place = Distance(), 0
    for segment in segments:
        allowed = segment.allowed() if check else None
        for first in range(0, segment.count, PIECE):
            piece = result[place + first : place + min(first + PIECE, segment.count)]
            _compare(own, piece, segment.exact, allowed, segment.start + first)
        place += segment.count
    if place != result.numel():
        raise AssertionError(f"{result.numel()} values of which {place} are known")
    totals = np.array([own.error, own.exact, own.outside])
    job_waits.waits().allreduce(comm, totals, lambda: "all ranks' errors")
    return Distance(float(totals[0]), float(totals[1]), int(totals[2]))


def _compare(total: Distance, piece: torch.Tensor, pattern: Floats, allowed: Floats | None, start: int) -> None:
    exact = torch.empty(piece.numel(), dtype=torch.float64)
    unroll(torch.from_numpy(pattern), start, exact)
    error = (piece.double() - exact).abs_()
    total.error += float(error.square().sum())
    total.exact += float(exact.square().sum())
    if allowed is not None:
        unroll(torch.from_numpy(allowed), start, exact)
        total.outside += int((~(error <= exact)).sum())  # NaN is outside, too


def same_bits(result: torch.Tensor, comm: MPI.Intracomm) -> bool:
    """True if all ranks have the same bits. Collective over comm."""
    digest = zlib.crc32(buffers.as_bytes(result).numpy().data)
    extremes = np.array([digest, -digest], dtype=np.int64)
    job_waits.waits().allreduce(comm, extremes, lambda: "all ranks' checksums", MPI.MAX)
    return bool(extremes[0] == -extremes[1])
