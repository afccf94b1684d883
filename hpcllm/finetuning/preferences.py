"""Learning from preferences: direct preference optimization (DPO), arXiv:2305.18290, section 4.

    a row       chosen c, rejected r of one prompt        log p(c) = - sum of the nats of c's counted targets
    rewards     beta (log p - log p of the reference)     of c and of r
    loss        - log sigmoid(reward of c - reward of r)  a mean over the pairs of the global batch

The model's only part in it are the nats of tokens: the derivative of the loss by them is one factor for all tokens of
c, and its negative for those of r. So forward and backward pass are those of pre-training, with that factor as the
weight of a token, known on the last stage once both sums are: a pair lies in one row (data/pairs.py). The reference is
no second model but two numbers a pair (reference.py).

Figures have the names of TRL's DPOTrainer and are means over the pairs of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpcllm.config.schema import Config
from hpcllm.data.loader import Loader
from hpcllm.data.packing import SplitArrays
from hpcllm.data.pairs import PairRows, check_any, pair_rows
from hpcllm.data.store import Split, TokenStore
from hpcllm.evaluation.held_out import Validation, has_sums, run_forward
from hpcllm.finetuning.reference import LogProbabilities, first_ends, log_probabilities, reference_of
from hpcllm.model.loss import Criterion
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.output import say
from hpcllm.training.objective import open_loader

if TYPE_CHECKING:
    from hpcllm.mpi.mesh import Mesh
    from hpcllm.training.log import Record
    from hpcllm.training.setup import RunContext

FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True, eq=False)
class PairLoss:
    """Criterion of a microbatch of pairs. beta > 0; a row that holds no pair counts as nothing."""

    ends: Tensor  # (batch,) float32: inputs of the chosen document of each row
    reference: Tensor  # (batch, 2) float32: log-probabilities of chosen and rejected
    counts: Tensor  # (batch,) float32: 1 where a row holds a pair, else 0
    beta: float
    size: int = 1 + len(FIGURES)

    def __call__(self, nats: Tensor) -> Tensor:
        """Sum loss and FIGURES over the pairs. nats: (batch, sequence) float32."""
        found = log_probabilities(nats, self.ends)
        rewards = self.beta * (found - self.reference)
        margins = rewards[:, 0] - rewards[:, 1]
        each = [-functional.logsigmoid(margins), *rewards.unbind(1), (margins > 0).float(), margins, *found.unbind(1)]
        return (torch.stack(each) * self.counts).sum(1)


@dataclass
class Preferences:
    """DPO as an Objective."""

    beta: float
    kinds: tuple[str, ...] = ("dpo",)
    figures: tuple[str, ...] = FIGURES
    is_per_sample: bool = True
    reference: dict[Split, LogProbabilities] = field(default_factory=dict)  # of each split, see reference.py
    _held_out: PairRows | None = None

    def open_samples(self, config: Config, mesh: Mesh, store: TokenStore, device: torch.device) -> Loader:
        """Lay out the pairs that fit into a row; others are left out. Raises DataError if there are none."""
        rows = pair_rows(SplitArrays.of(store, "train"), config.data.sequence_length)
        on_root(mesh.world, lambda: check_any(rows))
        return open_loader(config, mesh, store, rows, device)

    def begin(self, run: RunContext) -> None:
        """Find the reference of the pairs that the run will read, in the run folder or by a pass over them."""
        rows = _pairs(run)
        splits: dict[Split, PairRows] = {"train": rows}
        if run.store.header.documents["validation"]:
            self._held_out = pair_rows(SplitArrays.of(run.store, "validation"), rows.sequence)
            splits["validation"] = self._held_out
        if run.mesh.world.rank == 0 and (long := rows.pairs - rows.count):
            what = "their two answers, each with its prompt, have more tokens than data.sequence_length"
            say([f"{long:,} of {rows.pairs:,} pairs are left out: {what} = {rows.sequence}"])
        self.reference = reference_of(run, splits)

    def criteria(self, run: RunContext, numbers: Sequence[int | None]) -> Sequence[Criterion]:
        """Make the loss of the training rows of these numbers."""
        return self._criteria(run, "train", _pairs(run), numbers)

    def facts(self, run: RunContext) -> Record:  # noqa: ARG002
        """Return nothing more."""
        return {}

    def validate(self, run: RunContext) -> Validation | None:
        """Measure the loss and FIGURES of held-out pairs, each once."""
        rows, config = self._held_out, run.config
        samples = min(rows.count if rows else 0, config.data.validation_sequences)
        if rows is None or not samples:
            return None
        sums = np.zeros(1 + len(FIGURES))
        passes = run_forward(
            config,
            run.mesh,
            run.engine,
            rows,
            range(samples),
            lambda numbers: self._criteria(run, "validation", rows, numbers),
        )
        found = torch.stack([scored.sums for scored in passes]).sum(0)  # read once, not after each batch
        if has_sums(run.mesh, run.engine):
            sums += found.cpu().numpy()
        run.control.allreduce(run.mesh.world, sums, lambda: "the sums over held-out pairs of all ranks")
        loss, *figures = (sums / samples).tolist()
        return Validation(loss, samples, figures=dict(zip(FIGURES, figures, strict=True)))

    def _criteria(self, run: RunContext, split: Split, rows: PairRows, numbers: Sequence[int | None]) -> list[PairLoss]:
        labels, known = np.zeros((len(numbers), 4), np.float32), self.reference.get(split)
        labels[:, 0] = first_ends(rows, numbers)
        for row, number in zip(labels, numbers, strict=True):
            if number is not None:
                row[1:3] = 0 if known is None else known[rows.numbers[number]]  # a step to be timed has none
                row[3] = 1
        parts = torch.from_numpy(labels).to(run.device).view(run.config.pipeline.microbatches, -1, 4)
        return [PairLoss(part[:, 0], part[:, 1:3], part[:, 3], self.beta) for part in parts]


def _pairs(run: RunContext) -> PairRows:
    """Return the rows of the training split."""
    assert isinstance(run.loader, Loader)
    assert isinstance(run.loader.rows, PairRows)
    return run.loader.rows
