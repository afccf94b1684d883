"""The commands allreduce, reduce_scatter, allgather, alltoall and broadcast.

    for each size:   every way once          its error, its bytes on the wire, with --check every value
                     all ways in turns       timing.py
                     a record each

A way is an algorithm with a codec. `mpi` is the library's bare call; all others go through the front doors, as a caller
would. Data is fresh in every iteration, and brought outside the timed part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.codecs import Codec, find_codec
from hpcllm.collectives import auto, group_of, operations
from hpcllm.collectives.group import Group
from hpcllm.collectives.selection import candidates
from hpcllm.collectives.tuning import load_tuning
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.wait import job_waits
from hpcllm.perf.arguments import VALUE_BYTES, Options
from hpcllm.perf.arrays import CPU, LIBRARY, Arrays, lengths
from hpcllm.perf.p2p import measure_link
from hpcllm.perf.records import Record, finite
from hpcllm.perf.session import VALUE_TYPES, Report, check_memory, facts, open_device, record_of
from hpcllm.perf.timing import in_turns, meet
from hpcllm.perf.values import distance, expected, same_bits

FIRST = (LIBRARY, "native", "auto")
REPLICATED = ("allreduce", "allgather", "broadcast")  # all ranks end with the same
PROBE_VALUES = 64


@dataclass(frozen=True)
class Way:
    algorithm: str
    codec: Codec

    def __str__(self) -> str:
        return f"{self.algorithm} {self.codec.name}"


@dataclass(frozen=True)
class Quality:
    """Quality of the result of one way at one size."""

    rel_error: float
    ratio: float
    chosen: str
    failure: str  # what --check found, or nothing


@dataclass(frozen=True)
class Bench:
    """Settings that stay the same over the sizes."""

    operation: str
    options: Options
    group: Group
    ways: Sequence[Way]
    link_gb_s: float | None
    stopping: Callable[[], bool]
    device: torch.device
    messages: str  # where they lie, for people; "" for arrays on the CPU


def run(operation: str, options: Options, comm: MPI.Intracomm | Group, stopping: Callable[[], bool]) -> int:
    """Measure; 1 if --check found an error. Collective over comm. Raises ConfigError before any work."""
    group = group_of(comm)
    _check(operation, options, group)
    report = Report(options, group.comm, len(options.sizes))
    device, messages = open_device(options, group)
    ways = find_ways(operation, options, group, device)
    link = options.bandwidth_gb_s or measure_link(group, device)
    bench = Bench(operation, options, group, ways, link, stopping, device, messages)
    for line in _head(bench):
        report.say(line)
    failures: list[str] = []
    for size_bytes in options.sizes:
        if meet(group.comm, stopping()):
            break
        records, found = measure(bench, size_bytes)
        report.add(records)
        failures += found
    report.close()
    for failure in failures if group.rank == 0 else []:
        print(f"hpcllm: --check: {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure(bench: Bench, size_bytes: int) -> tuple[list[Record], list[str]]:
    """A record of each way, and what --check found. Collective."""
    options, group = bench.options, bench.group
    size = size_bytes // VALUE_BYTES[options.dtype]
    shared = options.memory == "shared"
    arrays = Arrays(bench.operation, size, VALUE_TYPES[options.dtype], group, bench.device, shared)
    qualities = [assess(arrays, way, options.check) for way in bench.ways]
    cases = [arrays.case(way.algorithm, way.codec) for way in bench.ways]
    timed = in_turns(group.comm, cases, options.rounds(size_bytes), options.warmup, bench.stopping)
    arrays.free()
    records = [
        record_of(
            bench.operation, options, size_bytes, way.codec, seconds, group.size, group.nodes, bench.link_gb_s,
            algorithm=way.algorithm, rel_error=finite(quality.rel_error), ratio=quality.ratio, chosen=quality.chosen,
        )
        for way, quality, seconds in zip(bench.ways, qualities, timed, strict=False)  # none if a signal came at once
    ]  # fmt: skip
    found = zip(bench.ways, qualities, strict=True)
    return records, [f"{way} at {size_bytes} bytes: {q.failure}" for way, q in found if q.failure]


def find_ways(operation: str, options: Options, group: Group, device: torch.device = CPU) -> list[Way]:
    """Each requested algorithm with each codec that it carries, found out by trying. Collective. Raises ConfigError."""
    ways = _requested_ways(operation, options, group, device)
    arrays = Arrays(operation, PROBE_VALUES, VALUE_TYPES[options.dtype], group, device)
    kept, left_out = [], []
    for way in ways:
        arrays.refresh()
        try:
            arrays.call(way.algorithm, way.codec)()
        except ValueError as error:
            left_out.append(f"{way} left out: {error}")
        else:
            kept.append(way)
    if not kept:
        raise ConfigError(f"nothing to measure: {'; '.join(left_out)}")
    for reason in left_out if group.rank == 0 and options.algorithms else []:
        print(f"hpcllm: {reason}", file=sys.stderr)
    return kept


def _requested_ways(operation: str, options: Options, group: Group, device: torch.device) -> list[Way]:
    """Ways of the options; by default the library's and all between which `auto` chooses."""
    valid = list(dict.fromkeys([*FIRST, *operations.valid_algorithms(operation, device.type)]))
    unknown = [name for name in options.algorithms if name not in (*valid, "all")]
    if unknown:
        raise ConfigError(f"--algorithms {unknown[0]!r} is unknown; valid for {operation}: {', '.join(valid)}, or all")
    ways = []
    for codec in options.codecs:
        names: Sequence[str] = valid if "all" in options.algorithms else options.algorithms
        if not names:
            good = candidates(operation, codec, options.dtype, group.shape)
            names = [name for name in valid if name in FIRST or name in good]
        try:
            found = find_codec(codec, VALUE_TYPES[options.dtype], device.type)
        except ValueError as error:
            raise ConfigError(f"--codecs: {error}") from error
        ways += [Way(name, found) for name in names]
    return sorted(ways, key=lambda way: valid.index(way.algorithm))


def assess(arrays: Arrays, way: Way, check: bool) -> Quality:
    """Quality of one run into memory that holds no earlier result. Collective."""
    arrays.out.fill_(torch.nan)
    arrays.refresh()
    wire, group = arrays.group.wire, arrays.group
    before = np.array([wire.plain_bytes, wire.sent_bytes])
    arrays.call(way.algorithm, way.codec)()
    counted = np.array([wire.plain_bytes, wire.sent_bytes]) - before
    job_waits.waits().allreduce(group.comm, counted, lambda: "all ranks' byte counters")
    ratio = float(counted[0] / counted[1]) if counted[1] else 1.0
    algorithm, chosen = way.algorithm, ""
    if algorithm == "auto":
        plan = auto.plan(arrays.operation, arrays.planned, way.codec, group, arrays.device.type)
        algorithm, chosen = plan.algorithm, f"{plan.algorithm} {plan.codec.name}"
    result = arrays.out.cpu()
    truth = expected(arrays.operation, arrays.size, group.rank, group.size, way.codec, algorithm)
    found = distance(result, truth, group.comm, check)
    failures = [f"{found.outside} values are further off than {way.codec.name} can be"] if found.outside else []
    if check and arrays.operation in REPLICATED and not same_bits(result, group.comm):
        failures.append("ranks end with different bits")
    return Quality(found.relative, ratio, chosen, " and ".join(failures))


def _check(operation: str, options: Options, group: Group) -> None:
    """Raise ConfigError for a measurement that cannot be made here. Collective."""
    if (options.device, options.memory) == ("gpu", "shared"):
        raise ConfigError("--memory shared holds arrays of the CPU; valid with --device gpu: private")
    x, out = lengths(operation, options.sizes[-1], 0, group.size)
    check_memory(4 * max(x, out), group)  # x, its fresh copy, out, and what an algorithm works in
    if options.tuning:
        path = options.tuning
        group.use_tuning(on_root(group.comm, lambda: load_tuning(path)))


def _head(bench: Bench) -> list[str]:
    options, group = bench.options, bench.group
    lines = [f"# {bench.operation}, {facts(options.dtype, group)}, {options.memory} memory on {options.device}"]
    if bench.messages:
        lines.append(f"# {bench.messages}")
    lines.append("# seconds: the slowest rank of each iteration; GB = 1e9 bytes of uncompressed data")
    if bench.link_gb_s is None:
        lines.append("# one rank: nothing is sent, so there is no bound")
    else:
        source = "given" if options.bandwidth_gb_s else "measured: the best of a stream between two ranks"
        near = "messages inside a node" + ("" if bench.messages else ", which node_window need not send")
        place = "a node's link" if group.nodes > 1 else near
        lines.append(f"# bound: {bench.link_gb_s:.3g} GB/s ({source}) of {place}; no latency")
    return lines
