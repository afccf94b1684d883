"""`codec`: encode and decode in one process, beside a copy of the same memory.

    1 thread     [ encode all values ]
    T threads    [ part 0 ][ part 1 ] ... [ part T - 1 ]     parts begin at whole blocks; kernels release the GIL

moved = bytes read plus bytes written, for a copy twice its size: a codec that reaches memcpy's rate takes no longer
than moving its data does. Rank 0 measures; others, if there are any, wait without taking its cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
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
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads that are counted are ours
    try:
        with ThreadPoolExecutor(cores) as pool:
            for size_bytes in options.sizes:
                report.add(_measure(options, size_bytes, sorted({1, cores}), pool, stopping) if comm.rank == 0 else [])
                if meet(comm, stopping()):
                    break
    finally:
        torch.set_num_threads(before)
    report.close()
    return 0


def _measure(
    options: Options, size_bytes: int, threads: Sequence[int], pool: ThreadPoolExecutor, stopping: Callable[[], bool]
) -> list[Record]:
    dtype = VALUE_TYPES[options.dtype]
    values = torch.empty(size_bytes // VALUE_BYTES[options.dtype], dtype=dtype)
    unroll(pattern(0, dtype), 0, values)
    decoded = torch.zeros_like(values)
    jobs = []
    for count in threads:
        jobs.append(copying(values, decoded, count))
        for name in options.codecs:
            if name != "raw":  # which moves nothing
                jobs += coding(values, decoded, find_codec(name, dtype), count)
    cases = [Case(_nothing, _runner(job.parts, pool)) for job in jobs]
    timed = in_turns(MPI.COMM_SELF, cases, options.rounds(size_bytes), options.warmup, stopping)
    done = list(zip(jobs, timed, strict=False))  # nothing was timed if a signal came at once
    copies = {job.threads: job.moved_bytes / seconds.median for job, seconds in done if job.direction == "memcpy"}
    return [_record(options, size_bytes, job, seconds, copies[job.threads]) for job, seconds in done]


def copying(values: torch.Tensor, out: torch.Tensor, threads: int) -> Job:
    """values -> out."""
    parts = [_bind(out[start:end].copy_, values[start:end]) for start, end in _cuts(values.numel(), 1, threads)]
    return Job("memcpy", find_codec("raw", values.dtype), parts, 2 * values.nbytes, values.nbytes, 0.0)


def coding(values: torch.Tensor, decoded: torch.Tensor, codec: Codec, threads: int) -> list[Job]:
    """values -> bytes, and bytes -> decoded; values are the pattern of rank 0."""
    encodes, decodes, encoded_bytes = [], [], 0
    decoded.fill_(torch.nan)
    for start, end in _cuts(values.numel(), codec.block, threads):
        out = torch.empty(codec.encoded_bytes(end - start), dtype=torch.uint8)
        data = codec.encode(values[start:end], out)
        encodes.append(_bind(codec.encode, values[start:end], out))
        decodes.append(_bind(codec.decode, data, decoded[start:end]))
        decodes[-1]()
        encoded_bytes += data.numel()
    truth = expected("p2p", values.numel(), 0, 1, codec, "")
    error, moved = distance(decoded, truth, MPI.COMM_SELF, check=False).relative, values.nbytes + encoded_bytes
    pairs = (("encode", encodes), ("decode", decodes))
    return [Job(direction, codec, parts, moved, encoded_bytes, error) for direction, parts in pairs]


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


def _cuts(n: int, block: int, parts: int) -> Iterable[tuple[int, int]]:
    """(start, end) of each part; all but the last are whole blocks."""
    return pairwise([n * part // parts // block * block for part in range(parts)] + [n])


def _nothing() -> None:
    """Encoding and decoding leave their input as it is."""
