"""Token stores as tasks: loss, perplexity and bits per byte of the held-out split, and of each source in it.

    rows of the run        a a a b | b b c c | c c c c        a, b, c: sources of the documents (data/sources.py)
    sums of each row       a  b      b  c      c              of the whole: all sums of a row together

A store is scored as training validates it: rows of data.sequence_length with the packing and the document mask of the
run, of a folder of weights in a stream. Rows are what the standard error of a loss counts; of a source those that hold
some of it, weighted by how much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.model_texts import other_token
from hpcllm.data.packing import Rows, SplitArrays, make_rows
from hpcllm.data.sources import Run
from hpcllm.data.store import TokenStore
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import batch_of_rows
from hpcllm.evaluation.figures import Figure, exponential, ratio
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import About, Options, Progress
from hpcllm.evaluation.tasks import Result, TaskName
from hpcllm.mpi.collective_errors import on_root

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class PreparedStore:
    """A store that is open and fits the model. count: rows that are scored."""

    task: TaskName
    rows: Rows
    count: int
    token_bytes: NDArray[np.uint32]
    sources: Sequence[str]  # [""] of one alone
    borders: NDArray[np.int64]  # (runs - 1,): tokens at which a run of documents of another source begins
    runs: NDArray[np.int64]  # (runs,): source of each


def prepare_store(task: TaskName, about: About, options: Options, comm: MPI.Intracomm | None) -> PreparedStore:
    """Open a store and lay out its held-out split. Collective over comm. Raises UserError."""
    assert task.path is not None
    store = TokenStore.open(task.path, comm)

    def check() -> None:
        if differ := other_token(about.tokenizer_json, store.tokenizer_json):
            raise DataError(f"{task.text} was not tokenized as the model has learned it: {differ}")
        if about.model.vocabulary < store.vocabulary:
            raise DataError(f"{task.text} has {store.vocabulary} tokens, the model {about.model.vocabulary}")

    on_root(comm, check)
    data, split = about.data, SplitArrays.of(store, "validation")
    rows = make_rows(split, data.sequence_length, data.packing, data.document_mask, comm)
    count = min(rows.count, options.limit or rows.count)
    if not count:
        raise DataError(f"the held-out split of {task.text} has no row of {data.sequence_length} tokens")
    told = [run for run in store.header.sources if run.validation] or [Run("", 0, len(split.documents) - 1)]
    sources = list(dict.fromkeys(run.name for run in told))
    documents = np.cumsum([run.validation for run in told])[:-1]
    borders = np.asarray(split.documents, np.int64)[documents]
    runs = np.array([sources.index(run.name) for run in told])
    return PreparedStore(task, rows, count, store.token_bytes, sources, borders, runs)


def measure_store(scorer: Scorer, prepared: PreparedStore, batch_tokens: int, progress: Progress) -> Result | None:
    """Score a store; None on all ranks but rank 0. Collective over the scorer's mesh.

    Raises DataError if no target counts, NonFiniteError, StallError.
    """
    count, kinds = prepared.count, len(prepared.sources)
    size = max(1, batch_tokens // prepared.rows.sequence)
    batches = -(-count // size)

    def source_of(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return prepared.runs[np.searchsorted(prepared.borders, tokens, "right")]

    with progress(prepared.task.text, batches) as advance:
        sums = scorer.sums(
            lambda number: batch_of_rows(
                prepared.rows, number * size, min(size, count - number * size), source_of if kinds > 1 else None, kinds
            ),
            batches, count * kinds, prepared.token_bytes, advance,
        )  # fmt: skip
    found = sums.reshape(count, kinds, 4)
    figures = _figures(found.sum(1))
    if not figures:
        raise DataError(f"the held-out split of {prepared.task.text} has no target that counts and stands for text")
    groups = {name: _of_source(found[:, number]) for number, name in enumerate(prepared.sources) if kinds > 1}
    there = {name: group for name, group in sorted(groups.items()) if group[1]}
    return None if scorer.mesh and scorer.mesh.world.rank else Result(
        prepared.task.text, prepared.task.kind, count, figures, there
    )  # fmt: skip


def _of_source(sums: NDArray[np.float64]) -> tuple[int, Mapping[str, Figure]]:
    """Return rows that hold something of a source, and its figures."""
    there = sums[sums[:, 2] > 0]
    return len(there), _figures(there)


def _figures(sums: NDArray[np.float64]) -> dict[str, Figure]:
    """Make figures of (rows, 4): nats, misses, targets, bytes; none if no target counts."""
    nats, misses, targets, text_bytes = sums.T
    if not targets.sum() or not text_bytes.sum():
        return {}
    loss = ratio(nats, targets)
    figures = {"loss": loss, "perplexity": exponential(loss)}
    figures["bits_per_byte"] = ratio(nats / math.log(2), text_bytes)
    figures["token_acc"] = ratio(targets - misses, targets)
    return figures
