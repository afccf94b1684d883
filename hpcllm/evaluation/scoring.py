"""Log-likelihoods of given tokens under a model: the engine of all that is measured without generating.

    batches 0 1 2 3 4 5 6            dealt over replicas: 0 3 6 | 1 4 | 2 5; in the last round those without a batch
       |                             run one that nobody counts, as ranks that shard weights have to work together
    stage 0 ... last stage           a replica's tp x pp ranks pass one batch after the other (inference/stages.py)
       |
    logits of the targets alone --> nats, and whether the target is the likeliest token
       |
    (requests, ...) float64: one rank alone has other values than 0 for a request, so the sum over all ranks is exact

So the same batches give the same bits on any number of replicas, if each computes with as many threads; over tp and pp
sums run in another order, and results differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcllm import collectives  # which starts MPI when a rank that is not alone first calls it
from hpcllm.errors import NonFiniteError
from hpcllm.evaluation.batches import Batch
from hpcllm.model.documents import Documents
from hpcllm.model.loss import cross_entropy
from hpcllm.model.transformer import Decoder, run_block
from hpcllm.pipeline.actions import Placement

if TYPE_CHECKING:
    from hpcllm.inference.stages import StageMessages
    from hpcllm.mpi.mesh import Mesh
    from hpcllm.mpi.wait import Waits

LOGITS_AT_ONCE = 1 << 24  # values over the whole vocabulary: 64 MiB in float32
Advance = Callable[[int], None]  # called with the number of batches that are done


class Score(NamedTuple):
    """Score of a continuation."""

    nats: float  # minus the log of its likelihood
    is_greedy: bool  # each token is the likeliest one after those before it: what greedy generation would write


class Scorer:
    """A model that scores, or this rank's chunks of it. All calls are collective over the mesh.

    mesh: None for a process alone. placement: of the chunks; None: one a rank. waits: of a run; None: of the job.
    shares_weights: replicas gather their weights from one another (ZeRO-3), so all run as many passes.
    """

    def __init__(
        self,
        decoders: Sequence[Decoder],
        mesh: Mesh | None = None,
        placement: Placement | None = None,
        waits: Waits | None = None,
        shares_weights: bool = False,
    ) -> None:
        self.decoders, self.mesh, self.shares_weights = decoders, mesh, shares_weights
        self.model, self.device = decoders[0].model, decoders[0].device
        self.placement = placement or Placement(mesh.pp.size if mesh else 1)
        self.rank = mesh.pp.rank if mesh else 0
        self.waits = waits
        self._messages: StageMessages | None = None

    @property
    def replicas(self) -> int:
        return self.mesh.dp.size if self.mesh else 1

    @property
    def replica(self) -> int:
        return self.mesh.dp.rank if self.mesh else 0

    def any_replica(self, flag: bool) -> bool:
        """Return True if the flag of any replica is true. Collective over dp. Raises StallError."""
        if not self.mesh:
            return flag
        from hpcllm.mpi.wait import WORK, job_waits

        flags = np.array([flag], np.int32)
        control = self.waits or job_waits.waits(WORK)
        control.allreduce(self.mesh.dp, flags, lambda: "all replicas to say whether they go on")
        return bool(flags[0])

    def scores(self, batches: Sequence[Batch], requests: int, advance: Advance = lambda _: None) -> list[Score]:
        """Score so many requests, laid out in batches; in their order, the same on all ranks.

        Same batches, same bits on any number of replicas. Raises NonFiniteError, StallError.
        """
        found = self.sums(batches.__getitem__, len(batches), requests, advance=advance)
        return [Score(nats, not misses) for nats, misses in found[:, :2].tolist()]

    def sums(
        self,
        batch_of: Callable[[int], Batch],
        batch_count: int,
        owners: int,
        token_bytes: NDArray[np.uint32] | None = None,
        advance: Advance = lambda _: None,
    ) -> NDArray[np.float64]:
        """Sum over the targets of each owner; the same on all ranks.

        batch_of: makes a batch of its number. token_bytes: bytes of text that each token stands for; None: not wanted.
        Returns (owners, 4): nats, targets that are not the likeliest token, targets, their bytes. Raises
        NonFiniteError, StallError.
        """
        found = np.zeros((owners, 4))
        with torch.no_grad(), self.exact():
            for batch, counts in self._mine(batch_of, batch_count):
                scored = self._score(batch)
                if scored is not None and counts:
                    sizes = np.zeros_like(scored[0]) if token_bytes is None else token_bytes[batch.targets]
                    for column, values in enumerate((*scored, np.ones_like(scored[0]), sizes)):
                        np.add.at(found[:, column], batch.owners, values)
                advance(1)
        if self.mesh:
            from hpcllm.mpi.wait import WORK, job_waits

            control = self.waits or job_waits.waits(WORK)
            control.allreduce(self.mesh.world, found, lambda: "the scores of all ranks")
        if not np.isfinite(found).all():
            raise NonFiniteError(
                "the loss of a text is not finite: the weights hold NaN or infinite values, or overflow in this "
                "--precision; `checkpoint inspect` shows which tensors"
            )
        return found

    def _mine(self, batch_of: Callable[[int], Batch], batch_count: int) -> Iterator[tuple[Batch, bool]]:
        """Yield the batches of this replica, and whether each counts: as many on every replica."""
        for first in range(0, batch_count, self.replicas):
            counts = first + self.replica < batch_count
            yield batch_of(first + self.replica if counts else first), counts

    def _score(self, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Run a batch forward: nats and misses of its targets, on the one rank of the replica that has them."""
        hidden = self._hidden_states(batch)
        if hidden is None:
            return None
        head = next(decoder for decoder in self.decoders if decoder.span.has_head)
        picked = hidden.flatten(0, 1)[torch.from_numpy(batch.places).to(self.device)]
        targets = torch.from_numpy(batch.targets).to(self.device)
        size = max(1, LOGITS_AT_ONCE // self.model.vocabulary)
        parts = [
            token_scores(head, *some)
            for some in zip(torch.split(picked, size), torch.split(targets, size), strict=True)
        ]
        if head.tp.rank or not parts:
            return None
        nats, hits = (torch.cat(each).double().cpu().numpy() for each in zip(*parts, strict=True))
        return nats, 1.0 - hits

    def _hidden_states(self, batch: Batch) -> Tensor | None:
        """Return (rows, longest, hidden) on the rank of the last stage, None on the others."""
        tokens = torch.from_numpy(batch.inputs).to(self.device)
        documents, x = _documents(batch, self.device), None
        for stage in range(self.placement.stages):
            here, chunk = self.placement.home(stage)
            if here != self.rank:
                continue
            before, after = (self._neighbour(stage + step) for step in (-1, 1))
            if before is not None:
                x = self._link().receive(before, (*tokens.shape, self.model.hidden))
            x = self.decoders[chunk].hidden_states(tokens if x is None else x, documents=documents)
            if after is not None:
                self._link().send(after, x)
                x = None
        return x

    def _neighbour(self, stage: int) -> int | None:
        """Return the rank of the pipeline that has a stage; None for this rank, and where there is no such stage."""
        if not 0 <= stage < self.placement.stages:
            return None
        rank = self.placement.home(stage)[0]
        return None if rank == self.rank else rank

    def _link(self) -> StageMessages:
        if self._messages is None:
            from hpcllm.inference.stages import StageMessages  # starts MPI

            assert self.mesh is not None
            self._messages = StageMessages(self.mesh, next(self.decoders[0].parameters()), self.waits)
        return self._messages

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Run with plain arithmetic: no codec, no split sequence, no block compiled for each length."""
        before = [(decoder.exact, decoder.shared_by, decoder.run_block) for decoder in self.decoders]
        for decoder in self.decoders:
            decoder.exact, decoder.run_block = True, run_block
            decoder.shared_by = replace(decoder.shared_by, sequence=False)
        try:
            yield
        finally:
            for decoder, (exact, shared_by, block) in zip(self.decoders, before, strict=True):
                decoder.exact, decoder.shared_by, decoder.run_block = exact, shared_by, block


def token_scores(head: Decoder, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (T,) float32 nats of targets, and 1 where a target is the likeliest token of all, else 0.

    head: a decoder with the head; hidden: (T, hidden) of its last block; targets: (T,) int64. Of equal logits the first
    token counts as the likeliest. The same on all ranks of tp. Collective over tp.
    """
    logits, tp = head.logits(hidden.unsqueeze(0)), head.tp
    best, rows = logits[0].max(dim=-1)
    tokens = rows + head.first_token
    if tp.group is not None:
        bests = collectives.allgather(best.float().unsqueeze(0), tp.group)
        owners = bests.argmax(dim=0, keepdim=True)
        tokens = collectives.allgather(tokens.unsqueeze(0), tp.group).gather(0, owners)[0]
    nats = cross_entropy(logits, targets.unsqueeze(0), tp, head.first_token)[0]
    return nats, (tokens == targets).float()


def _documents(batch: Batch, device: torch.device) -> Documents | None:
    if batch.lengths is None or len(batch.lengths) == len(batch.inputs):
        return None
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    positions = (np.arange(batch.inputs.size) - starts).reshape(batch.inputs.shape)
    return Documents(batch.lengths, torch.from_numpy(positions).to(device))
