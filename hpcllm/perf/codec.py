"""`codec`: encode and decode in one process, beside a copy of the same memory.

    1 thread     [ encode all values ]
    T threads    [ part 0 ][ part 1 ] ... [ part T - 1 ]     parts begin at whole blocks; kernels release the GIL

moved = bytes read plus bytes written, for a copy twice its size: a codec that reaches memcpy's rate takes no longer
than moving its data does. Rank 0 measures; others, if there are any, wait without taking its cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch
from mpi4py import MPI

from hpcllm.codecs import Codec, find_codec
from hpcllm.collectives import group_of
from hpcllm.perf.arguments import VALUE_BYTES, Options
from hpcllm.perf.check import distance
from hpcllm.perf.machine import VALUE_TYPES, check_memory, facts, library_name
from hpcllm.perf.records import Record, finite
from hpcllm.perf.report import Report
from hpcllm.perf.timing import Case, Seconds, in_turns, meet
from hpcllm.perf.values import expected, pattern, unroll

Run = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """Something to time: what one thread does is one entry of parts."""

    direction: str  # "encode", "decode" or "memcpy"
    codec: Codec
    parts: Sequence[Run]
    moved_bytes: int  # read plus written
    encoded_bytes: int
    rel_error: float

    @property
    def threads(self) -> int:
        return len(self.parts)


def run(operation: str, options: Options, comm: MPI.Intracomm, stopping: Callable[[], bool]) -> int:
    """Measure. Collective over comm. Raises ConfigError before any work."""
    check_memory(8 * options.sizes[-1], group_of(MPI.COMM_SELF))
    report = Report(options, comm, len(options.sizes))
    cores = len(os.sched_getaffinity(0))
    report.say(f"# {operation}, {facts(options.dtype, group_of(MPI.COMM_SELF))}; 1 thread and {cores}; GB = 1e9 bytes")
    torch.set_num_threads(1)  # threads are counted here
    with ThreadPoolExecutor(cores) as pool:
        for size_bytes in options.sizes:
            report.add(_measure(options, size_bytes, sorted({1, cores}), pool, stopping) if comm.rank == 0 else [])
            if meet(comm, stopping()):
                break
    report.close()
    return 0


def _measure(
    options: Options, size_bytes: int, threads: Sequence[int], pool: ThreadPoolExecutor, stopping: Callable[[], bool]
) -> list[Record]:
    dtype, n = VALUE_TYPES[options.dtype], size_bytes // VALUE_BYTES[options.dtype]
    codecs = [find_codec(name, dtype) for name in options.codecs if name != "raw"]  # raw moves nothing
    jobs = [job for count in threads for job in [_copying(n, dtype, count), *_coding(n, codecs, count)]]
    cases = [Case(_nothing, _runner(job.parts, pool)) for job in jobs]
    timed = in_turns(MPI.COMM_SELF, cases, options.rounds(size_bytes), options.warmup, stopping)
    copies = {
        job.threads: job.moved_bytes / s.median
        for job, s in zip(jobs, timed, strict=False)
        if job.direction == "memcpy"
    }
    return [_record(options, size_bytes, job, s, copies[job.threads]) for job, s in zip(jobs, timed, strict=False)]


def _copying(n: int, dtype: torch.dtype, threads: int) -> Job:
    values = _values(n, dtype)
    out = torch.zeros_like(values)
    cuts = [(n * part // threads, n * (part + 1) // threads) for part in range(threads)]
    parts = [_bind(out[start:end].copy_, values[start:end]) for start, end in cuts]
    return Job("memcpy", find_codec("raw", dtype), parts, 2 * values.nbytes, values.nbytes, 0.0)


def _coding(n: int, codecs: Sequence[Codec], threads: int) -> list[Job]:
    jobs = []
    for codec in codecs:
        values = _values(n, codec.dtype)
        decoded = torch.full_like(values, torch.nan)
        ends = [_whole_blocks(n * part // threads, codec.block) for part in range(threads)] + [n]
        cuts = [(values[start:end], decoded[start:end]) for start, end in pairwise(ends)]
        outs = [torch.empty(codec.encoded_bytes(part.numel()), dtype=torch.uint8) for part, _ in cuts]
        data = [codec.encode(part, out) for (part, _), out in zip(cuts, outs, strict=True)]
        encodes = [_bind(codec.encode, part, out) for (part, _), out in zip(cuts, outs, strict=True)]
        decodes = [_bind(codec.decode, used, part) for used, (_, part) in zip(data, cuts, strict=True)]
        for decode in decodes:
            decode()
        error = distance(decoded, expected("p2p", n, 0, 1, codec, ""), MPI.COMM_SELF, check=False).relative
        encoded = sum(used.numel() for used in data)
        moved = values.nbytes + encoded
        jobs += [
            Job(name, codec, parts, moved, encoded, error) for name, parts in (("encode", encodes), ("decode", decodes))
        ]
    return jobs


def _record(options: Options, size_bytes: int, job: Job, seconds: Seconds, memcpy_bytes_s: float) -> Record:
    return Record(
        operation="codec",
        algorithm=job.direction,
        codec=job.codec.name,
        dtype=options.dtype,
        ranks=1,
        nodes=1,
        bytes=size_bytes,
        **seconds.summary(),
        algbw_gb_s=size_bytes / seconds.median / 1e9,
        busbw_gb_s=0.0,
        rel_error=finite(job.rel_error),
        ratio=size_bytes / job.encoded_bytes,
        library=library_name(),
        threads=job.threads,
        moved_gb_s=job.moved_bytes / seconds.median / 1e9,
        memcpy_share=job.moved_bytes / seconds.median / memcpy_bytes_s,
    )


def _runner(parts: Sequence[Run], pool: ThreadPoolExecutor) -> Callable[[], None]:
    """The first part here, the others on as many threads, all at once."""

    def together() -> None:
        others = [pool.submit(part) for part in parts[1:]]
        parts[0]()
        for other in others:
            other.result()

    return together


def _bind(function: Callable[..., object], *arguments: object) -> Run:
    return lambda: function(*arguments)


def _values(n: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty(n, dtype=dtype)
    unroll(pattern(0, dtype), 0, values)
    return values


def _whole_blocks(n: int, block: int) -> int:
    return n // block * block


def _nothing() -> None:
    """Encoding and decoding leave their input as it is."""
