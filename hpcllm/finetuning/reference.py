"""Log-probabilities that the reference gives to the answers of a run's pairs: two numbers a pair, computed once.

    reference.h5    /train, /validation    (pairs, 2) float32: log p of chosen and rejected; NaN: not needed so far
                    store, weights         fingerprints of the store and of the weights (attributes)

    sound, and of this store and weights? --yes--> take it --> pairs that the run reads and that it lacks --.
                                           no: said ----------> all pairs that the run reads ---------------+
    weights of run.start_from --> forward passes over those, on the ranks and layout of the run --> file  <-'

There is never a second model in memory: the weights are read, used, and then replaced by those of the run. Passes are
as in training but exact, without codecs, so that on the same layout the first step's rewards are 0. The file is one of
ours (checkpoint/header.py): checksummed, renamed into place when it is whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hpcllm.checkpoint import writer
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.huggingface.base import fingerprint
from hpcllm.checkpoint.huggingface.start import open_weights
from hpcllm.checkpoint.layout import Attribute, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import whole
from hpcllm.checkpoint.state import facts
from hpcllm.data.pairs import PairRows
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import Split
from hpcllm.errors import CheckpointError
from hpcllm.evaluation.held_out import has_sums, run_forward
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.wait import together
from hpcllm.system.output import say
from hpcllm.training.resume import read_start

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.training.setup import RunContext

FORMAT, VERSION = "hpcllm reference log-probabilities", 1
FILE = "reference.h5"  # in the run folder
LogProbabilities = NDArray[np.float32]  # (pairs, 2): of chosen and rejected; NaN: unknown


def log_probabilities(nats: Tensor, ends: Tensor) -> Tensor:
    """Sum the log-probabilities of the counted targets of each document, in one order: (batch, 2), chosen and rejected.

    nats: (batch, sequence) float32, 0 where a target does not count; ends: (batch,), inputs of the chosen document.
    """
    is_chosen = torch.arange(nats.shape[1], device=nats.device) < ends.unsqueeze(1)
    return -torch.stack([(nats * is_chosen).sum(1), (nats * ~is_chosen).sum(1)], dim=1)


def first_ends(rows: PairRows, numbers: Sequence[int | None]) -> NDArray[np.float32]:
    """(len(numbers),): inputs of the chosen document of each row; 0 where there is none."""
    return np.array([0 if number is None else rows.pieces(number)[0].inputs for number in numbers], np.float32)


@dataclass(frozen=True, eq=False)
class PairScores:
    """Criterion that gives the log-probabilities themselves, each in its place among those of the replica's share."""

    ends: Tensor  # as in log_probabilities
    first: int  # place of the microbatch's first row
    size: int  # 2 x rows of the share

    def __call__(self, nats: Tensor) -> Tensor:
        """(size,): those of the microbatch's rows, 0 elsewhere. nats: (batch, sequence) float32."""
        found = log_probabilities(nats, self.ends).flatten()
        return functional.pad(found, (2 * self.first, self.size - 2 * self.first - len(found)))


def reference_of(run: RunContext, splits: Mapping[Split, PairRows]) -> dict[Split, LogProbabilities]:
    """Take log-probabilities from the run folder, compute those that lack, and keep them there.

    Leaves the weights of run.start_from in the run if it had to compute. Collective over the mesh. Raises UserError if
    those cannot be read, CheckpointError if the file cannot be written.
    """
    world, path, start = run.mesh.world, run.run_folder / FILE, Path(run.config.run.start_from)
    has_start = on_root(world, start.exists)  # a run that has begun goes on also when its beginning is gone
    attributes = {"store": run.store.fingerprint, "weights": run.base or (_weights(start, world) if has_start else "")}
    found: dict[Split, LogProbabilities] = {
        s: np.full((rows.pairs, 2), np.nan, np.float32) for s, rows in splits.items()
    }
    if line := on_root(world, lambda: _load(path, attributes, found)):
        _say(run, line)
    for table in found.values():
        together(world, "to get the reference", partial(world.Bcast, table))
    missing = {split: _missing(run, split, rows, found[split]) for split, rows in splits.items()}
    if any(map(len, missing.values())):
        _say(run, f"computing the reference of {sum(map(len, missing.values())):,} pairs with the weights of {start}")
        began_s = time.perf_counter()
        read_start(run)
        for split, rows in splits.items():
            found[split][rows.numbers[missing[split]]] = score(run, rows, missing[split])
        on_root(world, lambda: _write(path, attributes, found))
        _say(run, f"the reference took {time.perf_counter() - began_s:.1f} s; it is kept in {path}")
    return found


def _weights(path: Path, world: MPI.Intracomm) -> str:
    with open_weights(path, world) as source:
        return fingerprint(source, world)


def score(run: RunContext, rows: PairRows, numbers: NDArray[np.int64]) -> LogProbabilities:
    """(len(numbers), 2): log-probabilities that the weights of the run give to the pairs of these rows, which rise.

    Collective over the mesh. Raises StallError.
    """
    run.engine.set_exact(True)
    run.optimizer.weights.exact = True
    share, parts = run.config.data.global_batch // run.mesh.dp.size, run.config.pipeline.microbatches

    def criteria(shared: Sequence[int | None]) -> list[PairScores]:
        ends = torch.from_numpy(first_ends(rows, shared)).to(run.device).view(parts, -1)
        return [PairScores(part, m * share // parts, 2 * share) for m, part in enumerate(ends)]

    result = np.zeros((len(numbers), 2))
    for scored in run_forward(run.config, run.mesh, run.engine, rows, numbers.tolist(), criteria):
        if has_sums(run.mesh, run.engine):
            mine = [number for number in scored.batch.numbers if number is not None]
            result[np.searchsorted(numbers, mine)] = scored.sums.view(share, 2)[: len(mine)].cpu().numpy()
    run.control.allreduce(run.mesh.world, result, lambda: "the reference of all ranks")
    return result.astype(np.float32)


def _missing(run: RunContext, split: Split, rows: PairRows, known: LogProbabilities) -> NDArray[np.int64]:
    """Rows that the run will read and whose pairs are not known, rising. Collective over the mesh."""
    if split == "validation":
        needed = np.arange(min(rows.count, run.config.data.validation_sequences))
    elif (end := on_root(run.mesh.world, lambda: _last_position(run))) >= rows.count:
        needed = np.arange(rows.count)
    else:  # of a first epoch that is not finished
        sampler = Sampler(rows.count, run.config.run.seed)
        needed = np.sort(np.array([sampler.index(position) for position in range(end)], np.int64))
    return needed[np.isnan(known[rows.numbers[needed]]).any(1)]


def _last_position(run: RunContext) -> int:
    """Position in the run's samples that none is read from beyond; a run that goes on had other batches, maybe."""
    config, folder = run.config, run.run_folder / "checkpoints"
    ends = [config.run.steps * config.data.global_batch]
    for path in newest_first(folder):
        with contextlib.suppress(CheckpointError), Checkpoint.open(path) as file:
            known = facts(file)
            ends.append(known.position + max(0, config.run.steps - known.step) * config.data.global_batch)
    return max(ends)


def _load(path: Path, attributes: Mapping[str, str], found: Mapping[Split, LogProbabilities]) -> str:
    """Fill `found` from the file, on rank 0; returns what kept it from that, for people, or ''."""
    if not path.exists():
        return ""
    try:
        with Checkpoint.open(path) as file:
            if (file.attributes.get("format"), file.attributes.get("version")) != (FORMAT, VERSION):
                raise CheckpointError(f"{path} is no reference of this version")
            changed = [key for key, value in attributes.items() if value and file.attributes.get(key) != value]
            if changed:
                raise CheckpointError(f"{path} is of {' and '.join(f'other {key}' for key in changed)}")
            if file.specs != {split: DatasetSpec(table.shape, "float32") for split, table in found.items()}:
                raise CheckpointError(f"{path} is of another number of pairs")
            tables = {split: file.read_whole(split) for split in found}
    except CheckpointError as error:
        return f"{error}; the reference is computed anew"
    for split, table in tables.items():
        found[split][:] = table
    return ""


def _write(path: Path, attributes: Mapping[str, str], found: Mapping[Split, LogProbabilities]) -> None:
    """Write the file whole, over an older one. For rank 0. Raises CheckpointError."""
    specs = {str(split): DatasetSpec(table.shape, "float32") for split, table in found.items()}
    slabs = [whole(split, spec.shape) for split, spec in specs.items()]
    tables: dict[str, LogProbabilities] = {str(split): table for split, table in found.items()}
    plan = writer.prepare(None, specs, slabs)
    everything: dict[str, Attribute] = {"format": FORMAT, "version": VERSION, **attributes}
    writer.write(path, None, plan, lambda slab: tables[slab.dataset], everything)


def _say(run: RunContext, line: str) -> None:
    if run.mesh.world.rank == 0:
        say([line])
