"""One pass of a model that several ranks share.

    stage 0   unread tokens -> embedding, blocks --(N, hidden)--> stage 1  ...  -> last stage: logits, tokens drawn
       ^                                                                                                    |
       +------------------------------------ a token a text, to all ranks ---------------------------------+

Every rank has the same batch and calls next_tokens with the same texts; tp ranks of a stage work on a layer together,
each sends its result to the same tp rank of the next stage. One rank alone draws, so one answer decides. In training a
rank may have several stages, its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcllm.collectives import allgather, broadcast, group_of
from hpcllm.errors import NonFiniteError
from hpcllm.inference.batch import Text
from hpcllm.inference.cached_model import CachedModel
from hpcllm.inference.stages import StageMessages
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.partition import chunk_range
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.actions import Placement

NOT_FINITE = -1  # in place of a token: the ranks that did not draw raise too


class SharedModel:
    """One rank's part of a model in making texts; `next_tokens` is collective over the ranks that share it."""

    def __init__(
        self,
        mesh: Mesh,
        models: Sequence[CachedModel],
        placement: Placement | None = None,
        waits: Waits | None = None,
    ) -> None:
        """mesh: of which each replica makes texts of its own. models: this rank's chunks.

        placement: of the chunks; None: one a rank. waits: of a run; None: of the job.
        """
        self.mesh, self.models = mesh, models
        self.placement = placement or Placement(mesh.pp.size)
        decoder = models[0].decoder
        self.model = decoder.model
        self.messages = StageMessages(mesh, torch.empty(0, dtype=decoder.dtype, device=decoder.device), waits)
        if waits is None:
            group_of(mesh.pp).wire.waits = self.messages.waits
        self.last, self.last_chunk = self.placement.home(self.placement.stages - 1)

    def next_tokens(self, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        """Read what is unread of each text and draw a token for each (batch.NextTokens). Collective.

        Raises NonFiniteError, StallError.
        """
        answer = self._read(texts)
        tokens = np.zeros(len(texts), dtype=np.int64)
        error = None
        if answer is not None:
            logits = self._gather_logits(answer)
            try:
                drawn = self.models[self.last_chunk].draw(logits, texts, uniforms) if self.mesh.tp.rank == 0 else 0
                tokens[:] = drawn
            except NonFiniteError as found:
                tokens[:], error = NOT_FINITE, found
            broadcast(tokens, self.mesh.tp, 0)
        broadcast(tokens, self.mesh.pp, self.last)
        if NOT_FINITE in tokens:
            raise error or NonFiniteError("the logits of the next token are not finite on the last stage")
        return [int(token) for token in tokens]

    def _read(self, texts: Sequence[Text]) -> Tensor | None:
        """Run this rank's stages, in order: (texts, this rank's vocabulary) on the rank of the last one, else None."""
        shape, x = (sum(len(text.unread) for text in texts), self.model.hidden), None
        for stage in range(self.placement.stages):
            here, chunk = self.placement.home(stage)
            if here != self.mesh.pp.rank:
                continue
            before, after = (self._peer(stage + step) for step in (-1, 1))
            if before is not None:
                x = self.messages.receive(before, shape)
            x = self.models[chunk].read(self.models[chunk].unread(texts) if x is None else x, texts)
            if after is not None:
                self.messages.send(after, x)
                x = None
        return x

    def _peer(self, stage: int) -> int | None:
        """Return the rank of the pipeline that has a stage; None for this rank, and where there is no such stage."""
        if not 0 <= stage < self.placement.stages:
            return None
        rank = self.placement.home(stage)[0]
        return None if rank == self.mesh.pp.rank else rank

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """Gather (texts, vocabulary) logits from their parts on the ranks of tp, which may differ by a row."""
        ranks, vocabulary = self.mesh.tp.size, self.model.vocabulary
        if ranks == 1:
            return logits
        sizes = [end - first for first, end in (chunk_range(vocabulary, ranks, rank) for rank in range(ranks))]
        most = max(sizes)
        part = logits.new_zeros(most, len(logits))
        part[: logits.shape[1]] = logits.t()
        whole = part.new_empty(ranks, *part.shape)
        allgather(part, self.mesh.tp, out=whole)
        return torch.cat([piece[:size] for piece, size in zip(whole, sizes, strict=True)]).t()
