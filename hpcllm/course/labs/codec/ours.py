"""Our own codec in the format of the lab: what races and demonstrations run, and what laws hold a student's bytes to.

    [ scale, float32 ] x blocks [ code, int8 ] x n          kernels of hpcllm.codecs.quantise, int8:256

allreduce sends parts from rank to rank as a student would, so that a race compares codecs, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.codecs.quantise import decode8, encode8

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Encode = Callable[[Values], Bytes]
Decode = Callable[[Bytes, int], Values]
BLOCK = 256
LEAST_SCALE = np.float32(2.0**-126)


def blocks_of(n: int) -> int:
    return -(-n // BLOCK)


def encoded_bytes(n: int) -> int:
    """Return the bytes of the encoding of n values."""
    return n + 4 * blocks_of(n)


def parts_of(data: Bytes, n: int) -> tuple[Values, NDArray[np.int8]]:
    """View scales and codes of an encoding."""
    cut = 4 * blocks_of(n)
    return data[:cut].view(np.float32), data[cut : cut + n].view(np.int8)


def scales_like(data: Bytes, n: int) -> NDArray[np.float64]:
    """Return the scale of each of n values of an encoding."""
    scales = np.ascontiguousarray(data[: 4 * blocks_of(n)]).view(np.float32)
    return scales.astype(np.float64).repeat(BLOCK)[:n]


def encode(values: Values) -> Bytes:
    """Encode (n,) values."""
    data = np.empty(encoded_bytes(values.size), np.uint8)
    scales, codes = parts_of(data, values.size)
    encode8(values, codes.view(np.uint8), scales, BLOCK)
    return data


def decode(data: Bytes, n: int) -> Values:
    """Decode n values."""
    values = np.empty(n, np.float32)
    scales, codes = parts_of(data, n)
    decode8(values, codes.view(np.uint8), scales, BLOCK, False)
    return values


def with_feedback(values: Values, residual: Values) -> Bytes:
    """Encode values and residual, and keep what the encoding left out."""
    wanted = values + residual
    data = encode(wanted)
    residual[:] = np.nan_to_num(wanted - decode(data, wanted.size), nan=0.0, posinf=0.0, neginf=0.0)
    return data


def pays_from(link_bytes_per_s: float, call_s: float, codec_bytes_per_s: float) -> float:
    """Return the values from which an encoded message comes sooner; infinite where none does."""
    gain_s = (4 - (1 + 4 / BLOCK)) / link_bytes_per_s - 4 / codec_bytes_per_s
    return call_s / gain_s if gain_s > 0 else math.inf


def allreduce(x: Values, comm: MPI.Intracomm) -> None:
    """Sum in two steps, encoded. Collective over comm."""
    two_steps(x, comm, encode, decode, encoded_bytes)


def plain_allreduce(x: Values, comm: MPI.Intracomm) -> None:
    """Sum in two steps, as float32. Collective over comm."""
    two_steps(x, comm, lambda part: part.view(np.uint8), lambda data, _: data.view(np.float32), lambda n: 4 * n)


def two_steps(x: Values, comm: MPI.Intracomm, encode: Encode, decode: Decode, size: Callable[[int], int]) -> None:
    """Sum by owners: they get everybody's addend, encoded, and send everybody the sum. size: bytes of n values."""
    parts = np.array_split(x, comm.size)
    mine, others = parts[comm.rank], [(comm.rank + k) % comm.size for k in range(1, comm.size)]
    sent = [comm.Isend(encode(parts[other]), dest=other) for other in others]
    data = np.empty(size(mine.size), np.uint8)
    for other in others:
        comm.Recv(data, source=other)
        mine += decode(data, mine.size)
    MPI.Request.Waitall(sent)
    total = encode(mine)
    sent = [comm.Isend(total, dest=other) for other in others]
    mine[:] = decode(total, mine.size)
    for other in others:
        data = np.empty(size(parts[other].size), np.uint8)
        comm.Recv(data, source=other)
        parts[other][:] = decode(data, parts[other].size)
    MPI.Request.Waitall(sent)


REFERENCE = SimpleNamespace(
    encode=encode, decode=decode, with_feedback=with_feedback, pays_from=pays_from, allreduce=allreduce
)
