"""Is the result right? Its distance from the exact one, and with --check whether every value is within its bound."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.messages import buffers
from hpcllm.perf.timing import LIMIT_S
from hpcllm.perf.values import Floats, Segment, unroll
from hpcllm.waiting import Waits

PIECE = 1 << 20  # values compared at once, in float64


@dataclass
class Distance:
    """Between results and exact results."""

    error: float = 0.0  # sum of squares
    exact: float = 0.0  # sum of squares
    outside: int = 0  # values further off than allowed

    @property
    def relative(self) -> float:
        """NaN or infinite where a value was."""
        return math.sqrt(self.error / self.exact) if self.exact else math.sqrt(self.error)


def distance(result: torch.Tensor, segments: Iterable[Segment], comm: MPI.Intracomm, check: bool) -> Distance:
    """Of all ranks' results together. result: (n,), on the CPU. Collective over comm."""
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
    Waits(LIMIT_S).allreduce(comm, totals, lambda: "all ranks' errors")
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
    """Whether all ranks have the same. Collective over comm."""
    digest = zlib.crc32(buffers.as_bytes(result).numpy().data)
    extremes = np.array([digest, -digest], dtype=np.int64)
    Waits(LIMIT_S).allreduce(comm, extremes, lambda: "all ranks' checksums", MPI.MAX)
    return bool(extremes[0] == -extremes[1])
