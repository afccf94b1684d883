"""Rates of an allocation, measured in a few seconds: what cost.py needs to predict.

    near   every rank  -> the next one of its node, all at once         latency, start of a message, GB/s
    far    every place -> the same place of the next node, all at once  of a node: its ranks share the link
    core   copy, decode, add; encode and decode of each codec           all ranks at once, as in a collective
    window, library    a node's sum in shared memory as a link; the library's own collectives, of four lengths

A sample is a loop of at least SAMPLE_S; a number is the median of a rank's samples, then the slowest rank's. Loops are
as long on every rank, and every rank takes part in every measurement, so nobody waits for long.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.codecs.catalogue import find_codec
from hpcllm.collectives import operations
from hpcllm.collectives.cost import COSTS, VOLUMES, window_bytes
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.tuning import LIBRARY_SIZES, Coding, LibraryCall, Link, Rates
from hpcllm.collectives.wire import Wire

CODECS = ("bf16", "int8:256", "exp")  # what runs use most; each takes its kernels a second to compile at first
DTYPES = ("float32", "bfloat16")
SAMPLE_S = 2e-3
BUDGET_S = 40e-3  # for the samples of one number
SEGMENT_BYTES = 1 << 20
BURST = 16  # messages started together, to see what starting one costs
LONG_BYTES = 4 << 20  # of a sum through the window whose bandwidth is taken
LIBRARY_VALUES = [size_bytes // 4 for size_bytes in LIBRARY_SIZES]
BEYOND_CACHES_BYTES = 32 << 20
DIGITS = 4


def measure(group: Group, codecs: Sequence[str] = CODECS, dtypes: Sequence[str] = DTYPES) -> Rates:
    """Measure all rates; the same on every rank. Collective over group. Raises ValueError for an unknown codec.

    codecs: names; "raw" is measured in any case. With one node, or one rank, missing links get the rates of others.
    """
    clock, wire = Clock(group), group.wire
    counted = wire.sent_bytes, wire.plain_bytes
    call_s = clock.seconds(_empty_call())
    near, message_s = _link(clock, group.node, True)
    far, far_message_s = _link(clock, group.peers, group.node.rank < group.lanes) if group.nodes > 1 else (near, 0.0)
    far = dataclasses.replace(far, bandwidth_gb_s=far.bandwidth_gb_s * group.lanes) if group.nodes > 1 else near
    if max(group.node_sizes) == 1 and group.nodes > 1:
        near, message_s = far, far_message_s
    window = _window(clock, call_s) if max(group.node_sizes) > 1 else near
    rates = Rates(
        near=near,
        far=far,
        window=window,
        call_s=call_s,
        setup_s=_setup_s(clock, call_s + message_s + max(near.latency_s, far.latency_s)),
        message_s=message_s,
        copy_gb_s=_copy_gb_s(clock, SEGMENT_BYTES),
        memory_gb_s=_copy_gb_s(clock, BEYOND_CACHES_BYTES),
        codings=_codings(clock, dict.fromkeys(["raw", *codecs]), dtypes),
        library=_library(clock, call_s) if group.size > 1 else {},
    )
    wire.sent_bytes, wire.plain_bytes = counted  # measuring counts as no traffic
    rounded: Rates = _rounded(rates)
    return rounded


class Clock:
    """Seconds of something that all ranks of a group do at once."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of a rank's samples, the slowest rank's. Collective; `call` may be, over the group or a part of it."""
        call()  # compiles, connects, touches memory for the first time
        first_s = self._slowest(self._loop(call, 1))
        loops = max(1, min(1000, round(SAMPLE_S / first_s)))
        samples = max(3, min(15, round(BUDGET_S / (loops * first_s))))
        return self._slowest(statistics.median(self._loop(call, loops) for _ in range(samples)))

    def _loop(self, call: Callable[[], object], loops: int) -> float:
        self.group.comm.Barrier()
        start = time.perf_counter()
        for _ in range(loops):
            call()
        return (time.perf_counter() - start) / loops

    def _slowest(self, seconds: float) -> float:
        value = np.array([max(seconds, 1e-9)])
        self.group.comm.Allreduce(MPI.IN_PLACE, value, MPI.MAX)
        return float(value[0])


def _empty_call() -> Callable[[], object]:
    x, alone = np.zeros(1, dtype=np.float32), group_of(MPI.COMM_SELF)
    return lambda: operations.allreduce(x, alone)


def _setup_s(clock: Clock, hop_s: float) -> float:
    """A gathering of one value a rank, less its hops."""
    group = clock.group
    part, out = torch.zeros(1), torch.zeros(group.size)
    seconds = clock.seconds(lambda: operations.allgather(part, group, algorithm="ring", out=out))
    return max(seconds - (group.size - 1) * hop_s, 1e-7)


def _link(clock: Clock, comm: MPI.Intracomm, takes_part: bool) -> tuple[Link, float]:
    """(latency and GB/s of one rank, seconds to start a message), each rank sending to its right in comm."""
    wire = Wire(waits=clock.group.wire.waits)

    def seconds(size_bytes: int, count: int) -> float:
        if comm == MPI.COMM_NULL or comm.size == 1 or not takes_part:
            return clock.seconds(lambda: None)
        memory = wire.memory.scratch("measure", (count + 1) * size_bytes).view(count + 1, size_bytes)
        return clock.seconds(lambda: _shift(comm, wire, memory))

    one_s, burst_s, long_s = seconds(8, 1), seconds(8, BURST), seconds(SEGMENT_BYTES, 4)
    message_s = max((burst_s - one_s) / (BURST - 1), 1e-7)
    latency_s = max(one_s - message_s, 1e-7)
    return Link(latency_s, 4 * SEGMENT_BYTES / max(long_s - latency_s, 1e-9) / 1e9), message_s


def _shift(comm: MPI.Intracomm, wire: Wire, memory: torch.Tensor) -> None:
    """Receive a message from the left in each row but the first, and send that one to the right as often."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, landings = memory[0], memory[1:]  # MPI takes no memory for two receives at once
    requests = [request for landing in landings for request in wire.receive(comm, landing, left, 0)]
    for _ in landings:
        requests += wire.send(comm, sent, right, 0, sent.nbytes)
    wire.waits.all(requests, lambda: f"{len(landings)} messages of {sent.nbytes} bytes that measure a link")


def _window(clock: Clock, call_s: float) -> Link:
    """The latency and the bandwidth with which cost.py's formula for `node_window` meets the measured times."""
    node = group_of(clock.group.node)
    x = torch.zeros(LONG_BYTES // 4)

    def seconds(n: int) -> float:
        if node.size == 1:
            return clock.seconds(lambda: None)
        return clock.seconds(lambda: operations.allreduce(x[:n], node, algorithm="node_window"))

    latency_s, long_s = max(seconds(1) - call_s, 1e-7), seconds(x.numel())
    size_bytes = window_bytes(x.nbytes, max(clock.group.node_sizes))
    return Link(latency_s, size_bytes / max(long_s - call_s - latency_s, 1e-9) / 1e9)


def _copy_gb_s(clock: Clock, size_bytes: int) -> float:
    source, target = torch.ones(2, size_bytes, dtype=torch.uint8)
    return size_bytes / clock.seconds(lambda: target.copy_(source)) / 1e9


def _codings(clock: Clock, codecs: Iterable[str], dtypes: Sequence[str]) -> dict[tuple[str, str], Coding]:
    measured = [(_coding(clock, name, dtype), dtype) for name in codecs for dtype in dtypes]
    return {(coding.name, dtype): coding for coding, dtype in measured}


def _coding(clock: Clock, name: str, dtype: str) -> Coding:
    """Rates of one segment of values like gradients: normal, of another size every 256 values."""
    codec = find_codec(name, getattr(torch, dtype))
    random = torch.Generator().manual_seed(clock.group.rank)
    n = SEGMENT_BYTES // codec.dtype.itemsize
    sizes = torch.randn(n // 256, 1, generator=random).exp()
    values = (sizes * torch.randn(n // 256, 256, generator=random)).to(codec.dtype).view(-1)
    memory, out, total = torch.empty(codec.encoded_bytes(n), dtype=torch.uint8), values.clone(), torch.zeros(n)
    data = codec.encode(values, memory).clone()
    rate = SEGMENT_BYTES / 1e9
    return Coding(
        codec.name,
        ratio=SEGMENT_BYTES / data.numel(),
        encode_gb_s=rate / clock.seconds(lambda: codec.encode(values, memory)),
        decode_gb_s=rate / clock.seconds(lambda: codec.decode(data, out)),
        add_gb_s=rate / clock.seconds(lambda: codec.decode_add(data, total)),
    )


def _library(clock: Clock, call_s: float) -> dict[str, LibraryCall]:
    """The latency and the bandwidths with which cost.py's formula for `native` meets the measured times."""
    shape = clock.group.shape
    rounds = (shape.ranks - 1).bit_length()
    calls = {}
    for operation in COSTS:
        least_s, *times_s = (clock.seconds(_native(operation, clock.group, n)) for n in (shape.ranks, *LIBRARY_VALUES))
        latency_s = max(least_s - call_s, 1e-7) / rounds
        carried_s = [max(time_s - call_s - rounds * latency_s, 1e-9) for time_s in accumulate(times_s, max)]
        crossing = [VOLUMES[operation](n // shape.ranks * shape.ranks * 4, shape) for n in LIBRARY_VALUES]
        short, medium, long = (size / each_s / 1e9 for size, each_s in zip(crossing, carried_s, strict=True))
        calls[operation] = LibraryCall(latency_s, long, short, medium)
    return calls


def _native(operation: str, group: Group, n: int) -> Callable[[], object]:
    """The library's own collective of n values, cut to what every rank has as many of."""
    n -= n % group.size
    whole, part = torch.zeros(n), torch.zeros(n // group.size)
    x = part if operation == "allgather" else whole
    out = {"reduce_scatter": {"out": part}, "allgather": {"out": whole}}.get(operation, {})
    return partial(getattr(operations, operation), x, group, algorithm="native", **out)


def _rounded(value: Any) -> Any:
    """Round every number to the digits that a measurement is worth: a file keeps what is used at once."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS - 1}e}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **_rounded(dict(vars(value))))
    return value
