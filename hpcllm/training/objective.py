"""Objective of a run: which rows are its samples, what the last stage makes of their nats, how it is validated.

    loop        begin --> criteria of each batch --> sums: loss, figures --> divided once by tokens or samples --> log
                      `-> validate, now and then

The training loop takes one and knows none by name; NextToken is that of pre-training and of supervised fine-tuning,
whose store says which tokens count. Others lie above the loop, in hpcllm/finetuning, and are handed down by cli.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hpcllm.config.schema import Config
from hpcllm.data.packing import Rows, SplitArrays, make_rows
from hpcllm.data.store import Split, TokenStore
from hpcllm.evaluation.held_out import Validation, validate
from hpcllm.model.loss import Criterion

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.training.setup import RunContext


class Objective(Protocol):
    """One value for a run, the same on all ranks."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Values of finetuning.kind that it is the objective of."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of what is logged beside the loss, in the order of the sums of its criteria."""

    @property
    def is_per_sample(self) -> bool:
        """True if the loss is a mean over the samples of the global batch, else over its counted targets."""

    def rows(self, config: Config, store: TokenStore, split: Split, comm: MPI.Intracomm) -> Rows:
        """Lay out the samples of a split, one a row. Collective over comm. Raises UserError."""

    def begin(self, run: RunContext) -> None:
        """Prepare, before weights of a checkpoint are read. Collective over the mesh. Raises UserError, StallError."""

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:
        """Make the criterion of each microbatch from the numbers of this replica's rows; (): the sum over targets."""

    def validate(self, run: RunContext) -> Validation | None:
        """Score the held-out samples; None if there is not one. Collective over the mesh. Raises StallError."""


class NextToken:
    """Cross entropy of the next token, a mean over the targets that count."""

    kinds: tuple[str, ...] = ("none", "supervised")
    figures: tuple[str, ...] = ()
    is_per_sample = False

    def rows(self, config: Config, store: TokenStore, split: Split, comm: MPI.Intracomm) -> Rows:
        """Pack documents as [data] says."""
        data = config.data
        return make_rows(SplitArrays.of(store, split), data.sequence_length, data.packing, data.document_mask, comm)

    def begin(self, run: RunContext) -> None:
        """Do nothing."""

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:  # noqa: ARG002
        """Leave the sum over targets."""
        return ()

    def validate(self, run: RunContext) -> Validation | None:
        """Measure the held-out loss and bits per byte."""
        return validate(run.config, run.mesh, run.store, run.engine, run.control)


NEXT_TOKEN = NextToken()
