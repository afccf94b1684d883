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
from hpcllm.data.loader import Loader, Samples
from hpcllm.data.packing import Rows, SplitArrays, make_rows
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import TokenStore
from hpcllm.data.store_watch import StoreWatch
from hpcllm.evaluation.held_out import Validation, validate
from hpcllm.model.loss import Criterion

if TYPE_CHECKING:
    import torch

    from hpcllm.mpi.mesh import Mesh
    from hpcllm.training.log import Record
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

    def open_samples(self, config: Config, mesh: Mesh, store: TokenStore, device: torch.device) -> Samples:
        """Prepare this replica's share of the samples. Collective over the mesh. Raises UserError."""

    def begin(self, run: RunContext) -> None:
        """Prepare, before weights of a checkpoint are read. Collective over the mesh. Raises UserError, StallError."""

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:
        """Make the criterion of each microbatch from the numbers of this replica's rows; (): the sum over targets."""

    def facts(self, run: RunContext) -> Record:
        """Return what is logged beside the figures, since it was last asked. Collective over the mesh."""

    def validate(self, run: RunContext) -> Validation | None:
        """Score the held-out samples; None if there is not one. Collective over the mesh. Raises StallError."""


def open_loader(config: Config, mesh: Mesh, store: TokenStore, rows: Rows, device: torch.device) -> Loader:
    """Make the loader of this replica's share of rows of the training split."""
    data = config.data
    share = data.global_batch // mesh.dp.size
    return Loader(
        rows=rows,
        sampler=Sampler(rows.count, config.run.seed),
        share=share,
        first=mesh.dp.rank * share,
        global_batch=data.global_batch,
        microbatches=config.pipeline.microbatches,
        device=device,
        watch=StoreWatch(store, "train"),
    )


class NextToken:
    """Cross entropy of the next token, a mean over the targets that count."""

    kinds: tuple[str, ...] = ("none", "supervised")
    figures: tuple[str, ...] = ()
    is_per_sample = False

    def open_samples(self, config: Config, mesh: Mesh, store: TokenStore, device: torch.device) -> Samples:
        """Pack documents as [data] says."""
        data, split = config.data, SplitArrays.of(store, "train")
        rows = make_rows(split, data.sequence_length, data.packing, data.document_mask, mesh.world)
        return open_loader(config, mesh, store, rows, device)

    def begin(self, run: RunContext) -> None:
        """Do nothing."""

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:  # noqa: ARG002
        """Leave the sum over targets."""
        return ()

    def facts(self, run: RunContext) -> Record:  # noqa: ARG002
        """Return nothing more."""
        return {}

    def validate(self, run: RunContext) -> Validation | None:
        """Measure the held-out loss and bits per byte."""
        return validate(run.config, run.mesh, run.store, run.engine, run.control)


NEXT_TOKEN = NextToken()
