"""One model over several ranks, asked for one token after another.

    stage 0   new tokens -> embedding, blocks --(T, hidden)--> stage 1  ...  -> last stage: logits, one token drawn
       ^                                                                                                   |
       +------------------------------------ the token, to all ranks --------------------------------------+

Every rank calls next_token with the same words; tp ranks of a stage work on a layer together, each sends what it has
to the same tp rank of the next stage. One rank alone draws, so one random sequence decides.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpcllm import buffers
from hpcllm.collectives import allgather, broadcast, group_of
from hpcllm.mesh import Mesh
from hpcllm.model.sampling import Drawing, Reader
from hpcllm.waiting import Waits

LIMIT_S = 600.0  # for a message; a stage of a large model may be reading its first tokens


class Stage:
    """This rank's part of the work."""

    def __init__(self, mesh: Mesh, reader: Reader, drawing: Drawing) -> None:
        self.mesh, self.reader, self.drawing = mesh, reader, drawing
        self.waits = Waits(LIMIT_S)
        for comm in (mesh.world, mesh.tp):
            group_of(comm).wire.waits = self.waits
        self.first, self.last = mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
        self.drawer = mesh.world.allreduce(mesh.world.rank if self.last and mesh.tp.rank == 0 else 0)

    def next_token(self, tokens: list[int], afresh: bool) -> int:
        """See sampling.NextToken. Collective over the mesh. Raises StallError."""
        answer = self.reader.read(torch.tensor(tokens) if self.first else self._received(len(tokens)), afresh)
        token = np.zeros(1, dtype=np.int64)
        if self.last:
            logits = self._of_all_ranks(answer)
            if self.mesh.world.rank == self.drawer:
                token[0] = self.drawing.token(logits)
        else:
            self._send(answer)
        broadcast(token, self.mesh.world, self.drawer)
        return int(token[0])

    def _received(self, count: int) -> Tensor:
        """(count, hidden) from the stage before."""
        decoder, peer = self.reader.decoder, self.mesh.pp.rank - 1
        hidden = torch.empty(count, decoder.model.hidden, dtype=next(decoder.parameters()).dtype)
        self.waits.all(
            buffers.irecv(self.mesh.pp, hidden, peer, 0),
            lambda: f"{count} tokens from stage {peer} (rank {self.mesh.world_rank(peer)})",
        )
        return hidden

    def _send(self, hidden: Tensor) -> None:
        peer = self.mesh.pp.rank + 1
        self.waits.all(
            buffers.isend(self.mesh.pp, hidden.contiguous(), peer, 0),
            lambda: f"stage {peer} (rank {self.mesh.world_rank(peer)}) to take {len(hidden)} tokens",
        )

    def _of_all_ranks(self, logits: Tensor) -> Tensor:
        """(vocabulary,) from the parts that the ranks of tp have of it."""
        if self.mesh.tp.size == 1:
            return logits
        whole = torch.empty(self.reader.decoder.model.vocabulary, dtype=logits.dtype)
        allgather(logits.contiguous(), self.mesh.tp, out=whole)
        return whole
