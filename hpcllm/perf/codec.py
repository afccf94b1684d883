"""`codec`: encode and decode in one process, beside a copy of the same memory; on one thread, and on all.

    values (read-only)  --encode-->  bytes, kept  --decode-->  decoded        codecs share out long arrays by themselves

moved = bytes read plus bytes written, for a copy twice its size: a codec that reaches memcpy's rate takes no longer
than moving its data does. Rank 0 measures; others, if there are any, wait without taking its cores. On a device the
copy is the device's, and a call has ended when the device is done: small sizes show what it costs to start a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from mpi4py import MPI

from hpcllm.codecs import Codec, find_codec
from hpcllm.collectives import group_of
from hpcllm.errors import ConfigError
from hpcllm.perf.arguments import VALUE_BYTES, Options
from hpcllm.perf.records import Record, finite
from hpcllm.perf.session import VALUE_TYPES, Report, check_memory, facts, find_device, record_of
from hpcllm.perf.timing import Case, in_turns, meet
from hpcllm.perf.values import distance, expected, pattern, unroll
from hpcllm.system.device import synchronize


@dataclass(frozen=True)
class Job:
    """Something to time."""

    direction: str  # "encode", "decode" or "memcpy"
    codec: Codec
    run: Callable[[], object]
    moved_bytes: int  # read plus written
    encoded_bytes: int
    rel_error: float


def run(operation: str, options: Options, comm: MPI.Intracomm, stopping: Callable[[], bool]) -> int:
    """Measure. Collective over comm. Raises ConfigError before any work."""
    alone = group_of(MPI.COMM_SELF)
    check_memory((3 + len(options.codecs)) * options.sizes[-1], alone)
    report = Report(options, comm, len(options.sizes))
    device, cores = find_device(options, 0), len(os.sched_getaffinity(0))
    threads, where = ([1, cores], f"1 thread and {cores}") if device.type == "cpu" else ([1], f"arrays on {device}")
    report.say(f"# {operation}, {facts(options.dtype, alone)}; {where}; GB = 1e9 bytes")
    before = torch.get_num_threads()
    try:
        for size_bytes in options.sizes:
            report.add(_measure(options, size_bytes, sorted({*threads}), device, stopping) if comm.rank == 0 else [])
            if meet(comm, stopping()):
                break
    finally:
        torch.set_num_threads(before)
    report.close()
    return 0


def _measure(
    options: Options, size_bytes: int, threads: Sequence[int], device: torch.device, stopping: Callable[[], bool]
) -> list[Record]:
    dtype, n = VALUE_TYPES[options.dtype], size_bytes // VALUE_BYTES[options.dtype]
    values, records = torch.empty(n, dtype=dtype), []
    unroll(pattern(0, dtype), 0, values)
    values = values.to(device)
    try:
        codecs = [find_codec(name, dtype, device.type) for name in options.codecs]
    except ValueError as error:
        raise ConfigError(f"--codecs: {error}") from error
    jobs = make_jobs(values, torch.empty_like(values), codecs)

    def run(job: Job) -> None:  # leaves its input as it is
        job.run()
        synchronize(device)

    cases = [Case(partial(run, job)) for job in jobs]
    for count in threads:  # not in turns: a change of the number makes OpenMP start threads anew
        torch.set_num_threads(count)
        timed = in_turns(MPI.COMM_SELF, cases, options.rounds(size_bytes), options.warmup, stopping)
        for job, seconds in zip(jobs, timed, strict=False):  # nothing was timed if a signal came at once
            moved_gb_s = job.moved_bytes / seconds.median / 1e9
            memcpy_gb_s = jobs[0].moved_bytes / timed[0].median / 1e9
            record = record_of(
                "codec", options, size_bytes, job.codec, seconds, algorithm=job.direction, threads=count,
                rel_error=finite(job.rel_error), ratio=size_bytes / job.encoded_bytes, moved_gb_s=moved_gb_s,
                memcpy_share=moved_gb_s / memcpy_gb_s,
            )  # fmt: skip
            records.append(record)
    return records


def make_jobs(values: torch.Tensor, decoded: torch.Tensor, codecs: Sequence[Codec]) -> list[Job]:
    """A copy first, then encode and decode of each codec; values are the pattern of rank 0."""
    copy = partial(decoded.copy_, values)
    jobs = [Job("memcpy", find_codec("raw", values.dtype), copy, 2 * values.nbytes, values.nbytes, 0.0)]
    for codec in codecs:
        if codec.name == "raw":
            continue  # moves nothing
        out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        data = codec.encode(values, out)
        codec.decode(data, decoded.fill_(torch.nan))
        truth = expected("p2p", values.numel(), 0, 1, codec, "")
        error = distance(decoded.cpu(), truth, MPI.COMM_SELF, check=False).relative
        measures = (values.nbytes + data.numel(), data.numel(), error)
        jobs.append(Job("encode", codec, partial(codec.encode, values, out), *measures))
        jobs.append(Job("decode", codec, partial(codec.decode, data, decoded), *measures))
    return jobs
