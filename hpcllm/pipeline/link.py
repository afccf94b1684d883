"""The wires of one stage: activations come from the stage before, their gradients from the stage after.

        previous stage          this stage            next stage
        --- RECV_F m -->  take(FORWARD, m)
                                forward  --- SEND_F m -->
                          take(BACKWARD, m)  <-- RECV_B m ---
        <-- SEND_B m ---        backward

Nothing here blocks but `take` and `finish`: neighbours may send to each other at once. Receive buffers come from a pool
and go back to it when their microbatch is done; a sent tensor is kept until its message has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from mpi4py import MPI

from hpcllm import buffers
from hpcllm.mesh import Mesh
from hpcllm.pipeline.actions import Op
from hpcllm.waiting import Waits

WAY = {Op.FORWARD: "activation", Op.BACKWARD: "gradient"}


@dataclass
class Link:
    """Messages of one stage with its neighbours; every message has the shape (microbatch, sequence, hidden) float32."""

    mesh: Mesh
    shape: tuple[int, ...]
    waits: Waits
    sent_bytes: int = 0
    _free: list[torch.Tensor] = field(default_factory=list)
    _coming: dict[tuple[Op, int], tuple[list[MPI.Request], torch.Tensor]] = field(default_factory=dict)
    _leaving: list[tuple[list[MPI.Request], torch.Tensor, Op]] = field(default_factory=list)

    def receive(self, way: Op, microbatch: int) -> None:
        """Start receiving; `take` hands the tensor out."""
        buffer = self._free.pop() if self._free else torch.empty(self.shape)
        requests = buffers.irecv(self.mesh.pp, buffer, self._source(way), _tag(way, microbatch))
        self._coming[way, microbatch] = requests, buffer

    def take(self, way: Op, microbatch: int) -> torch.Tensor:
        """The tensor that a `receive` was started for, once here; to be handed back by `release`. Raises StallError."""
        requests, buffer = self._coming[way, microbatch]
        self.waits.all(
            requests,
            lambda: f"the {WAY[way]} of microbatch {microbatch} from {self.mesh.describe_stage(self._source(way))}",
        )
        del self._coming[way, microbatch]  # not before: a message later than the limit must not land in freed memory
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Give a taken buffer back to the pool; nobody may read it after this."""
        self._free.append(buffer)

    def send(self, way: Op, microbatch: int, tensor: torch.Tensor) -> None:
        """Start sending to the next stage (FORWARD) or the previous one (BACKWARD)."""
        self._leaving = [entry for entry in self._leaving if not MPI.Request.Testall(entry[0])]
        tensor = tensor.detach().contiguous()
        requests = buffers.isend(self.mesh.pp, tensor, self._target(way), _tag(way, microbatch))
        self._leaving.append((requests, tensor, way))
        self.sent_bytes += tensor.nbytes

    def finish(self) -> None:
        """Wait until everything sent has left. Raises StallError."""
        for requests, _, way in self._leaving:
            peer = self._target(way)
            self.waits.all(requests, lambda peer=peer: f"{self.mesh.describe_stage(peer)} to take its messages")  # type: ignore[misc]
        self._leaving.clear()

    def _source(self, way: Op) -> int:
        return self.mesh.pp.rank + (-1 if way is Op.FORWARD else 1)

    def _target(self, way: Op) -> int:
        return self.mesh.pp.rank + (1 if way is Op.FORWARD else -1)


def _tag(way: Op, microbatch: int) -> int:
    # the standard's smallest upper bound of tags is 32767; messages of one pair stay in order, so wrapping is safe
    return (2 * microbatch + (way is Op.BACKWARD)) % 32768
