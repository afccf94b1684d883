"""Works in float64 and rounds once, in pieces of some thousand values that stay in the cache; receives from anybody."""

from itertools import pairwise

import numpy as np
from mpi4py import MPI

BLOCK = 256
PIECE = 64 * BLOCK
LEAST = 2.0**-126


def pieces(n):
    return [(start, min(start + PIECE, n)) for start in range(0, n, PIECE)]


def encoded_size(n):
    return 4 * ((n + 255) >> 8) + n


def encode_piece(values, scales, codes):
    full = len(values) // BLOCK * BLOCK
    for rows, scale, code in (
        (values[:full].reshape(-1, BLOCK), scales[: full // BLOCK], codes[:full].reshape(-1, BLOCK)),
        (values[full:].reshape(1, -1), scales[full // BLOCK :], codes[full:].reshape(1, -1)),
    ):
        if rows.size == 0:
            continue
        wide = rows.astype(np.float64)
        peak = np.max(np.abs(wide), axis=1)
        ok = np.isfinite(peak)
        scale[:] = np.where(ok, np.maximum(peak / 127, LEAST), np.nan)
        divisor = np.where(ok, scale, 1).astype(np.float64)
        code[:] = np.where(ok[:, None], np.around(np.where(ok[:, None], wide, 0) / divisor[:, None]), 0)


def encode(values):
    n = len(values)
    data = np.zeros(encoded_size(n), np.uint8)
    scales, codes = data[: encoded_size(n) - n].view(np.float32), data[encoded_size(n) - n :].view(np.int8)
    for start, end in pieces(n):
        encode_piece(values[start:end], scales[start // BLOCK :][: -(-(end - start) // BLOCK)], codes[start:end])
    return data


def decode(data, n):
    head = encoded_size(n) - n
    scales = np.frombuffer(data, np.float32, count=head // 4)
    codes = np.frombuffer(data, np.int8, offset=head) if n else np.zeros(0, np.int8)
    values = codes.astype(np.float32)
    for start in range(0, n, PIECE):
        part = values[start : start + PIECE]
        part *= np.repeat(scales[start // BLOCK : (start + PIECE) // BLOCK], BLOCK)[: part.size]
    return values


def with_feedback(values, residual):
    wanted = (values.astype(np.float64) + residual).astype(np.float32)
    data = encode(wanted)
    error = wanted - decode(data, len(values))
    residual[:] = np.where(np.isfinite(error), error, 0)
    return data


def pays_from(link_bytes_per_s, call_s, codec_bytes_per_s):
    fastest = codec_bytes_per_s * (4 - 260 / 256) / 4
    if link_bytes_per_s >= fastest:
        return np.inf
    return call_s * link_bytes_per_s / ((4 - 260 / 256) * (1 - link_bytes_per_s / fastest))


def allreduce(x, comm):
    size, rank = comm.size, comm.rank
    bounds = [0]
    for part in np.array_split(x, size):
        bounds.append(bounds[-1] + part.size)
    part_of = [x[a:b] for a, b in pairwise(bounds)]
    inbox = [np.zeros(encoded_size(part_of[rank].size), np.uint8) for _ in range(size)]
    waiting = [comm.Irecv(inbox[peer], source=peer, tag=1) for peer in range(size) if peer != rank]
    waiting += [comm.Isend(encode(part_of[peer]), dest=peer, tag=1) for peer in range(size) if peer != rank]
    MPI.Request.Waitall(waiting)
    addends = [part_of[r] if r == rank else decode(inbox[r], part_of[rank].size) for r in range(size)]
    outbox = [np.zeros(encoded_size(part.size), np.uint8) for part in part_of]
    outbox[rank] = encode(np.sum(addends, axis=0, dtype=np.float32))
    waiting = [comm.Irecv(outbox[peer], source=peer, tag=2) for peer in range(size) if peer != rank]
    waiting += [comm.Isend(outbox[rank], dest=peer, tag=2) for peer in range(size) if peer != rank]
    MPI.Request.Waitall(waiting)
    for part, data in zip(part_of, outbox):
        part[:] = decode(data, part.size)


def measured_crossover():
    import timeit

    values = np.ones(1 << 17, np.float32)
    seconds = min(timeit.repeat(lambda: decode(encode(values), values.size), number=1, repeat=50))
    return values.size * 2.984 / seconds / 1e6


PREDICTIONS = {"bytes": 1015628, "sent_bytes": 1523448.0, "crossover": measured_crossover(), "speedup": 3.94}
