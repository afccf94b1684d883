"""Held-out loss: every validation sample once, whatever the layout, with the packing and masks of training.

    samples 0, 1, 2, ... in order, a global batch at a time; each replica takes its share of it through the pipeline,
    places past the end are filled with targets that do not count

Bits per byte = summed loss in nats / (ln 2 x bytes of text behind the scored tokens): comparable across tokenizers, and
with what a compressor makes of the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from hpcllm.config.schema import Config
from hpcllm.data.loader import documents_of
from hpcllm.data.packing import HostBatch, Rows, SplitArrays, make_rows, read_batch
from hpcllm.data.store import TokenStore
from hpcllm.model.loss import IGNORED, Criterion
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.schedules import forward_only


@dataclass(frozen=True)
class Validation:
    """Result of a validation over all samples."""

    loss: float  # nats a token, or what else the run learns by
    samples: int
    bits_per_byte: float | None = None  # of text
    figures: dict[str, float] = field(default_factory=dict)  # what else was measured

    def as_dict(self) -> dict[str, float]:
        """Return what is logged of it; keys carry the unit."""
        text = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"validation_loss": self.loss, **text, **{f"validation_{key}": v for key, v in self.figures.items()}}


class Scored(NamedTuple):
    """Share of a batch that one replica has run forward."""

    batch: HostBatch
    sums: torch.Tensor  # of Engine.run


CriteriaOf = Callable[[Sequence[int | None]], Sequence[Criterion]]  # numbers of rows -> criterion of each microbatch


def validate(config: Config, mesh: Mesh, store: TokenStore, engine: Engine, control: Waits) -> Validation | None:
    """Score the held-out samples; None if there is not one. Collective over the mesh. Raises StallError.

    control: waits for the sum over all ranks.
    """
    if not store.validation_bytes:
        return None
    data, split = config.data, SplitArrays.of(store, "validation")
    rows = make_rows(split, data.sequence_length, data.packing, data.document_mask, mesh.world)
    samples = min(rows.count, data.validation_sequences)
    if samples < 1:
        return None
    sums = np.zeros(3)  # loss in nats, tokens, bytes
    losses = []
    for scored in run_forward(config, mesh, engine, rows, range(samples)):
        losses.append(scored.sums)
        if has_sums(mesh, engine):
            counted = scored.batch.planes[1][scored.batch.planes[1] != IGNORED]
            sums[1:] += counted.size, store.token_bytes[counted].sum()
    sums[0] = torch.stack(losses).sum().item()  # read once, not after each batch
    control.allreduce(mesh.world, sums, lambda: "the sum of the validation loss over all ranks")
    nats, count, text_bytes = sums.tolist()
    return Validation(nats / max(1.0, count), samples, nats / math.log(2) / max(1.0, text_bytes))


def run_forward(
    config: Config,
    mesh: Mesh,
    engine: Engine,
    rows: Rows,
    numbers: Sequence[int],
    criteria_of: CriteriaOf = lambda _: (),
) -> Iterator[Scored]:
    """Run rows of these numbers forward, a global batch at a time, and yield this replica's share of each.

    Collective over the mesh. Sums are on the device, and 0 where has_sums is false. Raises StallError.
    """
    schedule = _schedule(engine.link.placement, config.pipeline.microbatches)
    share = config.data.global_batch // mesh.dp.size
    for start in range(mesh.dp.rank * share, mesh.dp.rank * share + len(numbers), config.data.global_batch):
        mine = numbers[start : start + share]
        batch = read_batch(rows, [*mine, *[None] * (share - len(mine))])
        planes = torch.from_numpy(batch.planes).to(engine.link.device)
        inputs, targets, positions = planes.view(3, config.pipeline.microbatches, -1, rows.sequence)
        documents, criteria = documents_of(batch.lengths, positions), criteria_of(batch.numbers)
        with torch.no_grad():
            sums = engine.run(schedule, inputs, targets, 1.0, documents, criteria)
        yield Scored(batch, sums)


def has_sums(mesh: Mesh, engine: Engine) -> bool:
    """True on the one rank of each replica whose sums count: tp rank 0 of the last stage."""
    return engine.chunks[-1].decoder.span.has_head and mesh.tp.rank == 0


_schedule = cache(forward_only)  # for all ranks of a large pipeline it takes as long as a step to make
