"""One pass of a model that several ranks share.

    stage 0   unread tokens -> embedding, blocks --(N, hidden)--> stage 1  ...  -> last stage: logits, tokens drawn
       ^                                                                                                    |
       +------------------------------------ a token a text, to all ranks ---------------------------------+

Every rank has the same batch and calls next_tokens with the same texts; tp ranks of a stage work on a layer together,
each sends its result to the same tp rank of the next stage. One rank alone draws, so one answer decides.
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

NOT_FINITE = -1  # in place of a token: the ranks that did not draw raise too


class SharedModel:
    """One rank's part of a model in making texts; `next_tokens` is collective over the ranks that share it."""

    def __init__(self, mesh: Mesh, model: CachedModel, waits: Waits | None = None) -> None:
        """mesh: of which each replica makes texts of its own. waits: of a run; None: those of the job."""
        self.mesh, self.model = mesh, model
        self.messages = StageMessages(
            mesh, torch.empty(0, dtype=model.decoder.dtype, device=model.decoder.device), waits
        )
        group_of(mesh.pp).wire.waits = self.messages.waits
        self.last = mesh.pp.size - 1

    def next_tokens(self, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        """Read what is unread of each text and draw a token for each (batch.NextTokens). Collective.

        Raises NonFiniteError, StallError.
        """
        stage, count = self.mesh.pp.rank, sum(len(text.unread) for text in texts)
        shape = count, self.model.decoder.model.hidden
        x = self.messages.receive(stage - 1, shape) if stage else self.model.unread(texts)
        answer = self.model.read(x, texts)
        tokens = np.zeros(len(texts), dtype=np.int64)
        error = None
        if stage < self.last:
            self.messages.send(stage + 1, answer)
        else:
            logits = self._gather_logits(answer)
            try:
                tokens[:] = self.model.draw(logits, texts, uniforms) if self.mesh.tp.rank == 0 else 0
            except NonFiniteError as found:
                tokens[:], error = NOT_FINITE, found
            broadcast(tokens, self.mesh.tp, 0)
        broadcast(tokens, self.mesh.pp, self.last)
        if NOT_FINITE in tokens:
            raise error or NonFiniteError("the logits of the next token are not finite on the last stage")
        return [int(token) for token in tokens]

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """Gather (texts, vocabulary) logits from their parts on the ranks of tp, which may differ by a row."""
        ranks, vocabulary = self.mesh.tp.size, self.model.decoder.model.vocabulary
        if ranks == 1:
            return logits
        sizes = [end - first for first, end in (chunk_range(vocabulary, ranks, rank) for rank in range(ranks))]
        most = max(sizes)
        part = logits.new_zeros(most, len(logits))
        part[: logits.shape[1]] = logits.t()
        whole = part.new_empty(ranks, *part.shape)
        allgather(part, self.mesh.tp, out=whole)
        return torch.cat([piece[:size] for piece, size in zip(whole, sizes, strict=True)]).t()
