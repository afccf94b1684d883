"""One rank's optimizer: what it updates, how weights come to those who did not, what a checkpoint keeps.

    shard              gradients        states, master     weights
    none               whole            whole              whole
    states             whole            share              whole, gathered after each update           ZeRO-1
    states+gradients   share            share              whole, gathered after each update           ZeRO-2
    all                share            share              share, gathered unit by unit when used      ZeRO-3

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
arXiv:1910.02054, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor, nn

from hpcllm.codecs import find_codec
from hpcllm.collectives import chunk_range
from hpcllm.config import OptimizerConfig
from hpcllm.model.presence import Presence
from hpcllm.optim.adamw import Share, make_share
from hpcllm.optim.pieces import Piece
from hpcllm.optim.sections import Section
from hpcllm.optim.weights import Weights


@dataclass
class Optimizer:
    shares: list[Share]  # one a section, in the order of a backward pass
    weights: Weights
    replica: int  # of
    replicas: int
    updates: int = 0  # made so far

    @property
    def presence(self) -> Presence:
        """For the decoders of this rank."""
        return self.weights.presence

    def update(self, learning_rate: float, factor: float) -> None:
        """AdamW with the gradients times `factor`; then replicas get each other's shares, in the background.

        Collective over the replicas.
        """
        self.updates += 1
        for number, share in reversed(list(enumerate(self.shares))):  # the next forward pass wants the last one first
            share.update(learning_rate, 1 / factor)
            self.weights.refresh(number, share.master)

    def settle(self) -> None:
        """All weights that this rank holds are up to date when this returns."""
        self.weights.settle()

    def pieces_to_write(self) -> list[Piece]:
        """What this rank writes to a checkpoint: the replicas together have each element once. Settles first."""
        self.settle()
        pieces: list[Piece] = []
        for share in self.shares:
            section = share.section
            whole = chunk_range(section.flat.size, self.replicas, self.replica)
            pieces += share.pieces(*((section.start, section.end) if section.sharded else whole))
        return pieces

    def pieces_to_read(self) -> list[Piece]:
        """What this rank needs from a checkpoint, to be filled in place; then call `loaded`."""
        self.settle()
        return [piece for share in self.shares for piece in share.pieces(share.section.start, share.section.end)]

    def owed(self) -> dict[str, Tensor]:
        """What error feedback of the gradients' sums owes, by what it belongs to. The worker must be idle."""
        return {what: surplus for share in self.shares for what, surplus in share.section.owed().items()}

    def loaded(self, updates: int) -> None:
        """The pieces were filled, with a state that has seen so many updates. Collective over the replicas."""
        self.updates = updates
        for share in self.shares:
            share.set_updates(updates)
        self.weights.restored()


def make_optimizer(
    sections: Sequence[Section],
    parameters: Mapping[str, nn.Parameter],
    gradients: Sequence[Tensor],
    weights: Weights,
    codec: str,
    dp: MPI.Intracomm,
    config: OptimizerConfig,
) -> Optimizer:
    """gradients: of each section, the memory of the sums that this rank owns. codec: of parameters, by name.

    Master weights are kept where the model's are of 16 bits, or replicas hold what a lossy codec made of them.
    """
    matrices = {name for name, p in parameters.items() if p.dim() > 1}
    dtype = next(iter(parameters.values())).dtype
    is_lossy = config.shard in ("states", "states+gradients") and not find_codec(codec, dtype).lossless
    keeps_master = dtype != torch.float32 or is_lossy

    def share(number: int) -> Share:
        return make_share(
            sections[number],
            lambda part: weights.owned(number, part),
            gradients[number],
            keeps_master,
            matrices.__contains__,
            config,
        )

    return Optimizer([share(number) for number in range(len(sections))], weights, dp.rank, dp.size)
