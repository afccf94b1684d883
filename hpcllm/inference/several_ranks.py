"""Generation by a model that several ranks share, one token after another.

    stage 0   new tokens -> embedding, blocks --(T, hidden)--> stage 1  ...  -> last stage: logits, one token drawn
       ^                                                                                                   |
       +------------------------------------ the token, to all ranks --------------------------------------+

Every rank calls next_token with the same tokens; tp ranks of a stage work on a layer together, each sends its result
to the same tp rank of the next stage. One rank alone draws, so one random sequence decides.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpcllm.collectives import allgather, broadcast
from hpcllm.inference.stages import StageMessages
from hpcllm.model.sampling import CachedDecoder, TokenSampler
from hpcllm.mpi.mesh import Mesh


class DistributedGeneration:
    """One rank's part in generating text; `next_token` is collective over the mesh."""

    def __init__(self, mesh: Mesh, reader: CachedDecoder, sampler: TokenSampler) -> None:
        self.mesh, self.reader, self.sampler = mesh, reader, sampler
        self.messages = StageMessages(mesh, next(reader.decoder.parameters()))
        self.first, self.last = mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
        self.drawer = mesh.world.allreduce(mesh.world.rank if self.last and mesh.tp.rank == 0 else 0)

    @property
    def device(self) -> torch.device:
        return self.reader.decoder.device

    def next_token(self, tokens: list[int], afresh: bool) -> int:
        """Read `tokens` and return the token that follows (sampling.NextToken). Collective over the mesh.

        Raises StallError.
        """
        before, after = self.mesh.pp.rank - 1, self.mesh.pp.rank + 1
        shape = (len(tokens), self.reader.decoder.model.hidden)
        x = torch.tensor(tokens, device=self.device) if self.first else self.messages.receive(before, shape)
        answer = self.reader.read(x, afresh)
        token = np.zeros(1, dtype=np.int64)
        if self.last:
            logits = self._gather_logits(answer)
            if self.mesh.world.rank == self.drawer:
                token[0] = self.sampler.token(logits)
        else:
            self.messages.send(after, answer)
        broadcast(token, self.mesh.world, self.drawer)
        return int(token[0])

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """Gather (vocabulary,) logits from their parts on the ranks of tp."""
        if self.mesh.tp.size == 1:
            return logits
        whole = logits.new_empty(self.reader.decoder.model.vocabulary)
        allgather(logits.contiguous(), self.mesh.tp, out=whole)
        return whole
