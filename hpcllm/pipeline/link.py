"""The messages of one rank: activations come from the virtual stage before, their gradients from the one after.

        stage before              this stage             stage after
        --- RECV_F3 -->  take(RECV_F3)
                                forward  --- SEND_F3 -->
                         take(RECV_B3)   <-- RECV_B3 ---
        <-- SEND_B3 ---         backward

    tensor --codec of the peer--> bytes ~~~~> bytes --decode, at take--> tensor          raw: no copy on either side

Nothing here waits for another rank but `take` and `finish`: two ranks may send to each other at once. Buffers come from
a pool and go back to it when their microbatch is done; what is sent is kept until its message has left.

Tensors of a device are sent once the device has made them, so `send` waits for that; their bytes lie where MPI can read
them (mpi/message_memory.py): raw ones are copied there, and back if that is the host.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Message:
    """A message that is on its way."""

    action: Action  # this rank's RECV or SEND
    peer: int  # the rank of the pipeline at the other end
    requests: list[MPI.Request]
    memory: torch.Tensor  # bytes that are sent or received into
    codec: Codec
    since_s: float = field(default_factory=time.perf_counter)  # when it was started


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
    memory: MessageMemory = field(init=False)
    _codecs_by_name: dict[str, Codec] = field(default_factory=dict)
    # (type of the device, bytes) -> buffers of the pool
    _free: defaultdict[tuple[str, int], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.memory = memory_for(self.device)

    def receive(self, action: Action) -> None:
        """Start a RECV; `take` hands the tensor out."""
        peer, _ = self._other_end(action)
        codec = self._codec(action, peer)
        landing = self._message_buffer(codec.encoded_bytes(math.prod(self.shape)))
        self.memory.before_receive(landing)
        requests = buffers.irecv(self.mesh.pp, landing, peer, self._tag(action, action.chunk))
        self.coming[action] = Message(action, peer, requests, landing, codec)

    def take(self, action: Action) -> torch.Tensor:
        """Wait for a RECV that was started; returns its tensor, to be handed back by `release`. Raises StallError."""
        message = self.coming[action]
        self.waits.all(message.requests, lambda: self.describe(message))
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
        """Start a SEND; the tensor must not change until its message has left."""
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
        self.memory.before_send(data)
        requests = buffers.isend(self.mesh.pp, data, peer, self._tag(action, receive.chunk))
        self.leaving.append(Message(action, peer, requests, kept, codec))
        self.plain_bytes[DIRECTION[action.op]] += tensor.nbytes
        self.sent_bytes[DIRECTION[action.op]] += data.nbytes

    def finish(self) -> None:
        """Wait until everything sent has left. Raises StallError."""
        for message in self.leaving:
            self.waits.all(message.requests, lambda message=message: self.describe(message))  # type: ignore[misc]
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
            if not MPI.Request.Testall(message.requests):
                still.append(message)
            elif self._pools_raw or not isinstance(message.codec, Raw):
                self._put_back(message.memory)
        self.leaving = still

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
        return free.pop() if free else self.memory.allocate(size_bytes)

    def _value_buffer(self, size_bytes: int) -> torch.Tensor:
        """Take a buffer on the device where this rank computes."""
        free = self._free[self.device.type, size_bytes]
        return free.pop() if free else torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def _put_back(self, buffer: torch.Tensor) -> None:
        self._free[buffer.device.type, buffer.nbytes].append(buffer)

    def _tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self.dtype).view(self.shape)
