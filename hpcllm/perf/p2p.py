"""`p2p`: two ranks, and what a codec does for a message between them.

    pingpong   encode, send ->, receive, decode, encode, <- send, receive, decode      time of one way = half
    stream     encode 0, send ->, encode 1 ..., at most two on their way               time of one of MESSAGES
                               receive 0, decode 0 ...          <- "all here"

Between the first and the last rank, and if that one is on another node, also with a rank of the first one's node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.codecs import Codec, find_codec
from hpcllm.collectives import group_of
from hpcllm.collectives.group import Group
from hpcllm.errors import ConfigError
from hpcllm.mpi import buffers
from hpcllm.mpi.message_memory import MessageMemory, memory_for
from hpcllm.mpi.wait import job_waits
from hpcllm.perf.arguments import VALUE_BYTES, Options
from hpcllm.perf.records import finite
from hpcllm.perf.session import VALUE_TYPES, Report, check_memory, facts, node_of_ranks, open_device, record_of
from hpcllm.perf.timing import Case, Seconds, finish, in_turns, meet
from hpcllm.perf.values import Distance, codec_ratio, distance, expected, pattern, unroll
from hpcllm.system.device import synchronize

CPU = torch.device("cpu")
MESSAGES = 8  # of a stream
SLOTS = 2
LINK_SIZES, LINK_ROUNDS = (1 << 20, 4 << 20), 5


@dataclass
class End:
    """This rank's end of messages of n values between ranks 0 and 1 of comm."""

    comm: MPI.Intracomm
    codec: Codec  # carried by memory
    memory: MessageMemory
    x: torch.Tensor  # (n,) of codec.dtype: what is sent
    out: torch.Tensor  # (n,): what has come
    slots: list[torch.Tensor] = field(init=False)  # encoded
    word: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.uint8))  # "all here"

    def __post_init__(self) -> None:
        capacity = self.codec.encoded_bytes(self.x.numel())
        self.slots = [self.memory.allocate(capacity) for _ in range(SLOTS)]

    def pingpong(self) -> None:
        if self.comm.rank == 0:
            finish(self.send(0), "a ping to leave")
        self.take(0, self.receive(0))
        if self.comm.rank == 1:
            finish(self.send(0), "a pong to leave")
        synchronize(self.x.device)

    def stream(self) -> None:
        sending = self.comm.rank == 0
        start = self.send if sending else self.receive
        flying = [start(slot) for slot in range(SLOTS)]
        for message in range(MESSAGES):
            slot = message % SLOTS
            if sending:
                finish(flying[slot], f"message {message} of a stream to leave")
            else:
                self.take(slot, flying[slot])
            flying[slot] = start(slot) if message + SLOTS < MESSAGES else []
        synchronize(self.x.device)
        last_word = (buffers.irecv if sending else buffers.isend)(self.comm, self.word, 1 - self.comm.rank, 1)
        finish(last_word, "the end of a stream")

    def send(self, slot: int) -> list[MPI.Request]:
        data = self.codec.encode(self.x, self.slots[slot])
        self.memory.before_send(data)
        return buffers.isend(self.comm, data, 1 - self.comm.rank, 0)

    def receive(self, slot: int) -> list[MPI.Request]:
        self.memory.before_receive(self.slots[slot])
        return buffers.irecv(self.comm, self.slots[slot], 1 - self.comm.rank, 0)

    def take(self, slot: int, requests: list[MPI.Request]) -> None:
        finish(requests, "a message to come")
        data = self.slots[slot]
        self.codec.decode(data[: self.codec.used_bytes(data, self.x.numel())], self.out)


def run(operation: str, options: Options, comm: MPI.Intracomm | Group, stopping: Callable[[], bool]) -> int:
    """Measure. Collective over comm. Raises ConfigError with one rank, and before any work."""
    group = group_of(comm)
    comm = group.comm
    if comm.size == 1:
        raise ConfigError("p2p needs two ranks, and this job has one; start it with mpirun -n 2 or srun --ntasks=2")
    if options.sizes[-1] > buffers.LARGEST_MESSAGE_BYTES // 2:
        raise ConfigError(f"--sizes: p2p takes messages up to {buffers.LARGEST_MESSAGE_BYTES >> 21}M")
    check_memory(8 * options.sizes[-1], group)
    peers = _peers(group)
    device, messages = open_device(options, group)
    report = Report(options, comm, len(peers) * len(options.sizes))
    report.say(f"# {operation}, {facts(options.dtype, group)}; seconds of one message, encode and decode included")
    if messages:
        report.say(f"# {messages}")
    for peer, nodes in peers:
        pair = _pair(comm, peer)
        link = options.bandwidth_gb_s or _link_gb_s(comm, pair, device)
        report.say(f"# rank 0 and rank {peer}, {'another' if nodes > 1 else 'the same'} node, link {link:.3g} GB/s")
        for size_bytes in options.sizes:
            if meet(comm, stopping()):
                break
            measured = _measure(options, size_bytes, pair, device, stopping) if pair != MPI.COMM_NULL else ()
            report.add([
                record_of(operation, options, size_bytes, codec, seconds, 2, nodes, link, **fields)
                for codec, seconds, fields in measured
            ])  # fmt: skip
        if pair != MPI.COMM_NULL:
            pair.Free()
    report.close()
    return 0


def measure_link(group: Group, device: torch.device = CPU) -> float | None:
    """GB/s of a stream from rank 0 to the first rank of another node, or of its own if there is one node only;
    None for one rank. device: where what is sent lies. Collective over group."""
    if group.size == 1:
        return None
    nodes = node_of_ranks(group)
    others = np.flatnonzero(nodes != nodes[0])
    peer = int(others[0]) if others.size else 1
    pair = _pair(group.comm, peer)
    rate = _link_gb_s(group.comm, pair, device)
    if pair != MPI.COMM_NULL:
        pair.Free()
    return rate


def _pair(comm: MPI.Intracomm, peer: int) -> MPI.Intracomm:
    """Ranks 0 and `peer`; COMM_NULL on the others. Collective over comm."""
    return cast(MPI.Intracomm, comm.Split(0 if comm.rank in (0, peer) else MPI.UNDEFINED, comm.rank))


def _link_gb_s(comm: MPI.Intracomm, pair: MPI.Intracomm, device: torch.device) -> float:
    """The best of some streams, as it is to be a limit; known on all ranks of comm. Collective over comm."""
    rate = np.zeros(1)
    if pair != MPI.COMM_NULL:
        ends = [_end(pair, size // 4, find_codec("raw", torch.float32, device.type), device) for size in LINK_SIZES]
        timed = in_turns(pair, [Case(end.stream) for end in ends], LINK_ROUNDS, 1, lambda: False)
        rate[0] = max(MESSAGES * size / s.samples.min() / 1e9 for size, s in zip(LINK_SIZES, timed, strict=True))
    job_waits.waits().all([comm.Ibarrier()], lambda: "the link to be measured")  # does not take the pair's cores
    comm.Bcast(rate, root=0)
    return float(rate[0])


def _measure(
    options: Options, size_bytes: int, pair: MPI.Intracomm, device: torch.device, stopping: Callable[[], bool]
) -> Iterator[tuple[Codec, Seconds, dict[str, Any]]]:
    """Yield codec, seconds and further fields of the records of one size. Collective over pair."""
    n = size_bytes // VALUE_BYTES[options.dtype]
    ends = [_end(pair, n, find_codec(name, VALUE_TYPES[options.dtype], device.type), device) for name in options.codecs]
    cases = [Case(run) for end in ends for run in (end.pingpong, end.stream)]
    errors = [finite(_error(end).relative) for end in ends]
    timed = in_turns(pair, cases, options.rounds(size_bytes), options.warmup, stopping)
    for index, seconds in enumerate(timed):
        codec, error = ends[index // 2].codec, errors[index // 2]
        name, messages = ("stream", MESSAGES) if index % 2 else ("pingpong", 2)
        ratio = codec_ratio(codec.name, codec.dtype)
        yield codec, seconds.each(messages), {"algorithm": name, "rel_error": error, "ratio": ratio}


def _end(pair: MPI.Intracomm, n: int, codec: Codec, device: torch.device) -> End:
    values = torch.empty(n, dtype=codec.dtype)
    unroll(pattern(0, codec.dtype), 0, values)
    x, memory = values.to(device), memory_for(device)
    return End(pair, memory.staged(codec), memory, x, torch.zeros_like(x))


def _error(end: End) -> Distance:
    end.out.fill_(torch.nan)
    end.pingpong()
    truth = expected("p2p", end.x.numel(), end.comm.rank, 2, end.codec, "")
    return distance(end.out.cpu(), truth, end.comm, check=False)


def _peers(group: Group) -> list[tuple[int, int]]:
    """(rank, nodes of it and rank 0): the last rank, and one of rank 0's own node if the last is not. Collective."""
    nodes = node_of_ranks(group)
    last = group.size - 1
    if nodes[last] == nodes[0]:
        return [(last, 1)]
    near = [int(rank) for rank in np.flatnonzero(nodes == nodes[0]) if rank]
    return [(last, 2), *((rank, 1) for rank in near[:1])]
