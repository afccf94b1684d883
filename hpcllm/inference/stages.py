"""Hidden states between the stages of a model that only runs forward: one at a time, no gradient comes back.

    stage 0   blocks ---(B, T, hidden)---> stage 1   blocks ---> ...      each tp rank to the same one of the next stage

A send ends once the other side has taken the bytes, so two stages never send to each other: whoever passes batch after
batch is ahead of the next stage by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpcllm.codecs.casts import Raw
from hpcllm.collectives import group_of
from hpcllm.collectives.wire import Wire
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import Waits, job_waits


class StageMessages:
    """This rank's messages of hidden states; `like`: a tensor of their type and device.

    waits: of a run, whose collectives have theirs; None: those of the job, which the mesh's collectives get, too.
    """

    def __init__(self, mesh: Mesh, like: Tensor, waits: Waits | None = None) -> None:
        self.mesh, self.like = mesh, like.detach()
        self.waits = waits or job_waits.waits()
        self.wire = Wire(self.waits)
        for comm in () if waits else (mesh.world, mesh.tp):
            group_of(comm).wire.waits = self.waits

    @property
    def device(self) -> torch.device:
        return self.like.device

    def receive(self, peer: int, shape: Sequence[int]) -> Tensor:
        """Receive hidden states of a shape from a rank of the pipeline. Raises StallError."""
        hidden = self.like.new_empty(*shape)
        raw = self.wire.turn_to(self.device).staged(Raw(hidden.dtype))
        landing = self.wire.landing("stage before", hidden.view(-1), raw)
        self.waits.all(
            self.wire.receive(self.mesh.pp, landing, peer, 0),
            lambda: f"{math.prod(shape[:-1])} tokens from stage {peer} (rank {self.mesh.world_rank(peer)})",
        )
        raw.decode(landing, hidden.view(-1))
        return hidden

    def send(self, peer: int, hidden: Tensor) -> None:
        """Send hidden states to a rank of the pipeline. Raises StallError."""
        hidden = hidden.contiguous()
        raw = self.wire.turn_to(self.device).staged(Raw(hidden.dtype))
        data = raw.encode(hidden.view(-1), self.wire.memory.scratch("stage after", hidden.nbytes))
        self.waits.all(
            self.wire.send(self.mesh.pp, data, peer, 0, hidden.nbytes),
            lambda: f"stage {peer} (rank {self.mesh.world_rank(peer)}) to take {math.prod(hidden.shape[:-1])} tokens",
        )
