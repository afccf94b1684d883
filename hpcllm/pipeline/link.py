"""The wires of one stage: activations come from the stage before, their gradients from the stage after.

        previous stage          this stage            next stage
        --- RECV_F m -->  take(FORWARD, m)
                                forward  --- SEND_F m -->
                          take(BACKWARD, m)  <-- RECV_B m ---
        <-- SEND_B m ---        backward

    tensor --codec of the wire--> bytes ~~~~> bytes --decode, at take--> tensor          raw: no copy on either side

Nothing here blocks but `take` and `finish`: neighbours may send to each other at once. Buffers come from a pool and go
back to it when their microbatch is done; what is sent is kept until its message has left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from hpcllm import buffers
from hpcllm.codecs import Codec, find_codec
from hpcllm.mesh import Mesh
from hpcllm.pipeline.actions import Op
from hpcllm.waiting import Waits

WAY = {Op.FORWARD: "activation", Op.BACKWARD: "gradient"}
Codecs = dict[tuple[Op, int], str]  # what travels, and the stage at the other end -> codec


@dataclass
class Link:
    """Messages of one stage with its neighbours; every message has the shape (microbatch, sequence, hidden) float32."""

    mesh: Mesh
    shape: tuple[int, ...]
    waits: Waits
    codecs: Codecs = field(default_factory=dict)  # raw where nothing is said
    exact: bool = False  # while true all messages are raw, whatever `codecs` says; the same on both sides
    plain_bytes: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(WAY, 0))
    sent_bytes: dict[Op, int] = field(default_factory=lambda: dict.fromkeys(WAY, 0))
    _free: defaultdict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))  # by size
    _coming: dict[tuple[Op, int], tuple[list[MPI.Request], torch.Tensor, Codec]] = field(default_factory=dict)
    _leaving: list[tuple[list[MPI.Request], torch.Tensor, Op]] = field(default_factory=list)

    def receive(self, way: Op, microbatch: int) -> None:
        """Start receiving; `take` hands the tensor out."""
        codec = self._codec(way, self._source(way))
        landing = self._buffer(codec.encoded_bytes(math.prod(self.shape)))
        requests = buffers.irecv(self.mesh.pp, landing, self._source(way), _tag(way, microbatch))
        self._coming[way, microbatch] = requests, landing, codec

    def take(self, way: Op, microbatch: int) -> torch.Tensor:
        """The tensor that a `receive` was started for, once here; to be handed back by `release`. Raises StallError."""
        requests, landing, codec = self._coming[way, microbatch]
        self.waits.all(
            requests,
            lambda: f"the {WAY[way]} of microbatch {microbatch} from {self.mesh.describe_stage(self._source(way))}",
        )
        del self._coming[way, microbatch]  # not before: a message later than the limit must not land in freed memory
        if codec.name == "raw":
            return self._tensor(landing)
        tensor = self._tensor(self._buffer(4 * math.prod(self.shape)))
        codec.decode(landing[: codec.used_bytes(landing, tensor.numel())], tensor.view(-1))
        self.release(landing)
        return tensor

    def release(self, buffer: torch.Tensor) -> None:
        """Give a taken buffer back to the pool; nobody may read it after this."""
        self._free[buffer.nbytes].append(buffers.as_bytes(buffer))

    def send(self, way: Op, microbatch: int, tensor: torch.Tensor) -> None:
        """Start sending to the next stage (FORWARD) or the previous one (BACKWARD)."""
        self._reap()
        codec = self._codec(way, self._target(way))
        kept = tensor.detach().contiguous()
        data = kept
        if codec.name != "raw":
            kept = self._buffer(codec.encoded_bytes(tensor.numel()))
            data = codec.encode(tensor.detach().contiguous().view(-1), kept)
        requests = buffers.isend(self.mesh.pp, data, self._target(way), _tag(way, microbatch))
        self._leaving.append((requests, kept, way))
        self.plain_bytes[way] += tensor.nbytes
        self.sent_bytes[way] += data.nbytes

    def finish(self) -> None:
        """Wait until everything sent has left. Raises StallError."""
        for requests, _, way in self._leaving:
            peer = self._target(way)
            self.waits.all(requests, lambda peer=peer: f"{self.mesh.describe_stage(peer)} to take its messages")  # type: ignore[misc]
        self._reap()

    def _reap(self) -> None:
        """Forget what has left; encoded bytes lie in our own buffers, which are used again."""
        still = []
        for entry in self._leaving:
            if not MPI.Request.Testall(entry[0]):
                still.append(entry)
            elif entry[1].dtype == torch.uint8:
                self.release(entry[1])
        self._leaving = still

    def _codec(self, way: Op, peer: int) -> Codec:
        return find_codec("raw" if self.exact else self.codecs.get((way, peer), "raw"))

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        free = self._free[size_bytes]
        return free.pop() if free else torch.empty(size_bytes, dtype=torch.uint8)

    def _tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(torch.float32).view(self.shape)

    def _source(self, way: Op) -> int:
        return self.mesh.pp.rank + (-1 if way is Op.FORWARD else 1)

    def _target(self, way: Op) -> int:
        return self.mesh.pp.rank + (1 if way is Op.FORWARD else -1)


def _tag(way: Op, microbatch: int) -> int:
    # the standard's smallest upper bound of tags is 32767; messages of one pair stay in order, so wrapping is safe
    return (2 * microbatch + (way is Op.BACKWARD)) % 32768
