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

from hpcllm.codecs.casts import Raw
from hpcllm.collectives import allgather, broadcast, group_of
from hpcllm.collectives.wire import Wire
from hpcllm.model.sampling import CachedDecoder, TokenSampler
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import job_waits


class DistributedGeneration:
    """One rank's part in generating text; `next_token` is collective over the mesh."""

    def __init__(self, mesh: Mesh, reader: CachedDecoder, sampler: TokenSampler) -> None:
        self.mesh, self.reader, self.sampler = mesh, reader, sampler
        self.waits = job_waits.waits()
        self.wire = Wire(self.waits)
        for comm in (mesh.world, mesh.tp):
            group_of(comm).wire.waits = self.waits
        self.first, self.last = mesh.pp.rank == 0, mesh.pp.rank == mesh.pp.size - 1
        self.drawer = mesh.world.allreduce(mesh.world.rank if self.last and mesh.tp.rank == 0 else 0)

    @property
    def device(self) -> torch.device:
        return self.reader.decoder.device

    def next_token(self, tokens: list[int], afresh: bool) -> int:
        """Read `tokens` and return the token that follows (sampling.NextToken). Collective over the mesh.

        Raises StallError.
        """
        x = torch.tensor(tokens, device=self.device) if self.first else self._receive(len(tokens))
        answer = self.reader.read(x, afresh)
        token = np.zeros(1, dtype=np.int64)
        if self.last:
            logits = self._gather_logits(answer)
            if self.mesh.world.rank == self.drawer:
                token[0] = self.sampler.token(logits)
        else:
            self._send(answer)
        broadcast(token, self.mesh.world, self.drawer)
        return int(token[0])

    def _receive(self, count: int) -> Tensor:
        """Receive (count, hidden) from the stage before."""
        decoder, peer = self.reader.decoder, self.mesh.pp.rank - 1
        hidden = next(decoder.parameters()).detach().new_empty(count, decoder.model.hidden)
        raw = self.wire.turn_to(self.device).staged(Raw(hidden.dtype))
        landing = self.wire.landing("stage before", hidden.view(-1), raw)
        self.waits.all(
            self.wire.receive(self.mesh.pp, landing, peer, 0),
            lambda: f"{count} tokens from stage {peer} (rank {self.mesh.world_rank(peer)})",
        )
        raw.decode(landing, hidden.view(-1))
        return hidden

    def _send(self, hidden: Tensor) -> None:
        peer, hidden = self.mesh.pp.rank + 1, hidden.contiguous()
        raw = self.wire.turn_to(self.device).staged(Raw(hidden.dtype))
        data = raw.encode(hidden.view(-1), self.wire.memory.scratch("stage after", hidden.nbytes))
        self.waits.all(
            self.wire.send(self.mesh.pp, data, peer, 0, hidden.nbytes),
            lambda: f"stage {peer} (rank {self.mesh.world_rank(peer)}) to take {len(hidden)} tokens",
        )

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """Gather (vocabulary,) logits from their parts on the ranks of tp."""
        if self.mesh.tp.size == 1:
            return logits
        whole = logits.new_empty(self.reader.decoder.model.vocabulary)
        allgather(logits.contiguous(), self.mesh.tp, out=whole)
        return whole
