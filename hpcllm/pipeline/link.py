"""The messages of one rank: activations come from the virtual stage before, their gradients from the one after.

        stage before              this stage             stage after
        --- RECV_F3 -->  take(RECV_F3)
                                forward  --- SEND_F3 -->
                         take(RECV_B3)   <-- RECV_B3 ---
        <-- SEND_B3 ---         backward

    tensor --codec of the peer--> bytes ~~~~> bytes --decode, at take--> tensor          raw: no copy on either side

Nothing here waits for another rank but `take` and `finish`: two ranks may send to each other at once. Buffers come from
a pool and go back to it when their microbatch is done; what is sent is kept until its message has left.

Tensors of a device are sent once the device has made them, and a buffer is received into once the device has read what
was in it. Nobody waits for either: such a message is held, and `advance` starts it when its event has passed.

    engine   F4 queued, send(SEND_F4)   B2 queued    take(RECV_B3): advance, test, advance, test ...
    device   ....| F4 .......| B2 ..                       |
    message                  `- event ------- advance -----'- Isend

The pool hands out the buffer that was given back first, and keeps SPARES more than are in use: the event of the last
one given back is the end of work that was queued a moment ago. Bytes lie where MPI can read them
(mpi/message_memory.py): raw ones of a device are copied there, and back if that is the host.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from mpi4py import MPI

from hpcllm.codecs import Codec, find_codec
from hpcllm.codecs.casts import Raw
from hpcllm.mpi import buffers
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.message_memory import MessageMemory, memory_for
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.actions import Action, Op, Placement, message_tag, other_end

FORWARD, BACKWARD = Op.FORWARD, Op.BACKWARD  # directions of a message
DIRECTION = {op: Op(op[-1]) for op in Op if op.startswith(("RECV", "SEND"))}
CPU = torch.device("cpu")
CONTENT = {FORWARD: "activation", BACKWARD: "gradient"}
Codecs = dict[tuple[Op, int], str]  # direction, rank at the other end -> codec
SPARES = 2  # buffers of a size that a device has free before one is used again


@dataclass(frozen=True)
class Message:
    """A message that is on its way, or held until the device is done with its bytes."""

    action: Action  # this rank's RECV or SEND
    peer: int  # the rank of the pipeline at the other end
    data: torch.Tensor  # bytes that are sent or received into
    memory: torch.Tensor  # the buffer in which they lie
    codec: Codec
    start: Callable[[], list[MPI.Request]]
    requests: list[MPI.Request] = field(default_factory=list)  # none while it is held
    since_s: float = field(default_factory=time.perf_counter)  # when it was asked for


@dataclass
class Link:
    """Messages of one rank of a pipeline. All have one type and one shape, (microbatch, sequence, hidden).

    Where tp splits the sequence between its layers, a message holds the part of this rank, and so does its peer.
    """

    mesh: Mesh
    placement: Placement
    shape: tuple[int, ...]
    waits: Waits
    codecs: Codecs = field(default_factory=dict)  # raw for a pair that is not in here
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    exact: bool = False  # while true all messages are raw, whatever `codecs` says; the same on both sides
    plain_bytes: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(CONTENT, 0))
    sent_bytes: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(CONTENT, 0))
    coming: dict[Action, Message] = field(default_factory=dict)  # by its RECV
    leaving: list[Message] = field(default_factory=list)
    held: list[Message] = field(default_factory=list)  # of both, those that have not started
    memory: MessageMemory = field(init=False)
    _codecs_by_name: dict[str, Codec] = field(default_factory=dict)
    # (type of the device, bytes) -> buffers of the pool, the one first that was given back first
    _free: defaultdict[tuple[str, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self.memory = memory_for(self.device)
        self.memory.settle = self.waits.settle
        self.waits.poll_for(self.device.type)

    def receive(self, action: Action) -> None:
        """Start a RECV, or hold it; `take` hands the tensor out."""
        peer, _ = self._other_end(action)
        codec = self._codec(action, peer)
        landing = self._message_buffer(codec.encoded_bytes(math.prod(self.shape)))
        start = partial(buffers.irecv, self.mesh.pp, landing, peer, self._tag(action, action.chunk))
        self.coming[action] = message = Message(action, peer, landing, landing, codec, start)
        self.held.append(message)
        self.advance()

    def take(self, action: Action) -> torch.Tensor:
        """Wait for a RECV that was started; returns its tensor, to be handed back by `release`. Raises StallError."""
        message = self.coming[action]
        self._wait(message)
        del self.coming[action]  # not before: a message later than the limit must not land in freed memory
        codec, landing = message.codec, message.memory
        if isinstance(codec, Raw):
            return self._tensor(landing)
        tensor = self._tensor(self._value_buffer(self.dtype.itemsize * math.prod(self.shape)))
        codec.decode(landing[: codec.used_bytes(landing, tensor.numel())], tensor.view(-1))
        self._put_back(landing)
        return tensor

    def release(self, buffer: torch.Tensor) -> None:
        """Give a taken buffer back to the pool. Nobody may read it after this but work already queued on a device."""
        self.memory.record(buffer)
        self._put_back(buffers.as_bytes(buffer))

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start a SEND, or hold it; the tensor must not change until its message has left."""
        self._reap()
        peer, receive = self._other_end(action)
        codec = self._codec(action, peer)
        kept = data = plain = tensor.detach().contiguous()
        if not isinstance(codec, Raw):
            kept = self._message_buffer(codec.encoded_bytes(plain.numel()))
            data = codec.encode(plain.view(-1), kept)
        elif self._pools_raw:
            kept = data = self._message_buffer(plain.nbytes)
            data.view(plain.dtype).copy_(plain.view(-1))
            self.memory.record(data)
        start = partial(buffers.isend, self.mesh.pp, data, peer, self._tag(action, receive.chunk))
        message = Message(action, peer, data, kept, codec, start)
        self.leaving.append(message)
        self.held.append(message)
        self.advance()
        self.plain_bytes[DIRECTION[action.op]] += tensor.nbytes
        self.sent_bytes[DIRECTION[action.op]] += data.nbytes

    def advance(self) -> None:
        """Start what is held and may start by now; never waits. Called between all actions and in all waits."""
        if not self.held:
            return
        still: list[Message] = []
        blocked: set[tuple[Op, int]] = set()  # messages of one kind and peer start in order: tags may repeat
        for message in self.held:
            way = message.action.op, message.peer
            if way not in blocked and self.memory.is_ready(message.data):
                message.requests.extend(message.start())
            else:
                blocked.add(way)
                still.append(message)
        self.held = still

    def finish(self) -> None:
        """Wait until everything sent has left. Raises StallError."""
        for message in self.leaving:
            self._wait(message)
        self._reap()

    def describe(self, message: Message) -> str:
        """Describe a message: 'the activation of microbatch 3 from stage 1 (rank 5), RECV_F3 posted 31.4 s ago'."""
        _, theirs = self._other_end(message.action)
        virtual = self.placement.stage(message.peer, theirs.chunk)
        stage = f"stage {virtual} (rank {self.mesh.world_rank(message.peer)})"
        what = f"the {CONTENT[DIRECTION[message.action.op]]} of microbatch {message.action.microbatch}"
        posted = f"{message.action} posted {time.perf_counter() - message.since_s:.1f} s ago"
        if theirs.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            return f"{what} from {stage}, {posted}"
        return f"{stage} to take {what}, {posted}"

    def _reap(self) -> None:
        """Forget what has left; encoded bytes lie in our own buffers, which are used again."""
        still = []
        for message in self.leaving:
            if not self._is_over(message):
                still.append(message)
            elif self._pools_raw or not isinstance(message.codec, Raw):
                self._put_back(message.memory)
        self.leaving = still

    def _wait(self, message: Message) -> None:
        self.waits.until(lambda: self._is_over(message), lambda: self.describe(message))

    def _is_over(self, message: Message) -> bool:
        self.advance()
        return bool(message.requests) and MPI.Request.Testall(message.requests)

    @property
    def _pools_raw(self) -> bool:
        """True if raw tensors are copied too: of a device's memory MPI gets to see the pool's alone."""
        return self.memory.place != "cpu"

    def _other_end(self, action: Action) -> tuple[int, Action]:
        return other_end(self.placement, self.mesh.pp.rank, action)

    def _tag(self, action: Action, receiving_chunk: int) -> int:
        return message_tag(action.microbatch, receiving_chunk, self.placement.chunks, DIRECTION[action.op] is BACKWARD)

    def _codec(self, action: Action, peer: int) -> Codec:
        name = "raw" if self.exact else self.codecs.get((DIRECTION[action.op], peer), "raw")
        if name not in self._codecs_by_name:
            self._codecs_by_name[name] = self.memory.staged(find_codec(name, self.dtype, self.device.type))
        return self._codecs_by_name[name]

    def _message_buffer(self, size_bytes: int) -> torch.Tensor:
        """Take a buffer that MPI can read and write."""
        free = self._free[self.memory.place, size_bytes]
        spares = 0 if self.device.type == "cpu" else SPARES
        return free.popleft() if len(free) > spares else self.memory.allocate(size_bytes)

    def _value_buffer(self, size_bytes: int) -> torch.Tensor:
        """Take a buffer on the device where this rank computes."""
        free = self._free[self.device.type, size_bytes]
        return free.popleft() if free else torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def _put_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.device.type, buffer.nbytes].append(buffer)

    def _tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self.dtype).view(self.shape)
