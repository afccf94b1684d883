"""reduceat over blocks, few temporary arrays; blocking sends in rounds of pairs; one class for the format."""

from __future__ import annotations

import time

import numpy as np

BLOCK, TOP = 256, np.float32(127)
TINY = np.finfo(np.float32).tiny


class Encoding:
    """Scales and codes in one array of bytes."""

    def __init__(self, n, data=None):
        blocks = (n + BLOCK - 1) // BLOCK
        self.data = np.empty(4 * blocks + n, np.uint8) if data is None else data
        self.scales = self.data[: 4 * blocks].view("f4")
        self.codes = self.data[4 * blocks :].view("i1")

    def spread(self, per_block):
        return per_block.repeat(BLOCK)[: self.codes.size]


def encode(values):
    made = Encoding(values.size)
    if values.size == 0:
        return made.data
    peak = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BLOCK))
    np.divide(peak, TOP, out=made.scales)
    np.maximum(made.scales, TINY, out=made.scales)
    with np.errstate(invalid="ignore"):
        quotient = values / made.spread(made.scales)
    broken = np.isnan(peak) | np.isinf(peak)
    if broken.any():
        made.scales[broken] = np.nan
        quotient[made.spread(broken)] = 0
    np.rint(quotient, out=quotient)
    made.codes[:] = quotient.astype(np.int8)
    return made.data


def decode(data, n):
    made = Encoding(n, data)
    return np.multiply(made.codes, made.spread(made.scales), dtype=np.float32)


def with_feedback(values, residual):
    residual += values
    data = encode(residual)
    residual -= decode(data, values.size)
    np.nan_to_num(residual, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    return data


def pays_from(link_bytes_per_s, call_s, codec_bytes_per_s):
    plain_s, encoded_s = 4 / link_bytes_per_s, (1 + 1 / 64) / link_bytes_per_s + 4 / codec_bytes_per_s
    if encoded_s >= plain_s:
        return float("inf")
    return call_s / (plain_s - encoded_s)


def allreduce(x, comm):
    parts = np.array_split(x, comm.size)
    mine = parts[comm.rank]
    total = mine.copy()
    for shift in range(1, comm.size):
        to, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        landing = Encoding(mine.size).data
        comm.Sendrecv(encode(parts[to]), dest=to, recvbuf=landing, source=source)
        total += decode(landing, mine.size)
    own = encode(total)
    mine[:] = decode(own, mine.size)
    for shift in range(1, comm.size):
        to, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        landing = Encoding(parts[source].size).data
        comm.Sendrecv(own, dest=to, recvbuf=landing, source=source)
        parts[source][:] = decode(landing, parts[source].size)


def seconds(n):
    values = np.sin(np.arange(n, dtype=np.float32))
    least = 1e9
    for _ in range(60):
        start = time.perf_counter()
        decode(encode(values), n)
        least = min(least, time.perf_counter() - start)
    return least


PREDICTIONS = {
    "bytes": 1_000_000 + 4 * 3907,
    "sent_bytes": 6 * (250_000 + 4 * 977),
    "crossover": 3e-6 * 100_000 / seconds(100_000),
    "speedup": 3.5,
}
