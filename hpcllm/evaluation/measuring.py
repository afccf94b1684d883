"""Tasks made ready, and measured by a model that is there: loaded by `hpcllm evaluate`, or in training.

    name --> examples --> requests, on all ranks --> Scorer --> scores --> rank 0: figures
    name --> open store --> rows ------------------> Scorer --> sums of rows --^
    name --> questions --> prompts --> texts (question_task.py) ---------------^

A store is scored as training validates it: rows of data.sequence_length with the packing and the document mask of the
run, of a folder of weights in a stream. Rows are what the standard error of its loss counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcllm.config.schema import Config
from hpcllm.data.model_texts import other_token
from hpcllm.data.packing import Rows, SplitArrays, make_rows
from hpcllm.data.store import TokenStore
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Request, batch_of_rows, batches_of_requests, check_lengths
from hpcllm.evaluation.code_task import PreparedCode, measure_code, prepare_code
from hpcllm.evaluation.examples import Example, requests_of
from hpcllm.evaluation.figures import exponential, ratio
from hpcllm.evaluation.question_task import PreparedQuestions, measure_questions, prepare_questions
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import About, Options, Progress
from hpcllm.evaluation.sharing import share_requests
from hpcllm.evaluation.tasks import Result, TaskName, examples_of, parse_task, result_of
from hpcllm.mpi.collective_errors import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.evaluation.judge_process import JudgeProcess


@dataclass(frozen=True)
class Prepared:
    """A task whose input is checked: requests on all ranks, examples on rank 0 alone; or an open store."""

    task: TaskName
    examples: Sequence[Example] = ()
    requests: Sequence[Request] = ()
    rows: Rows | None = None
    count: int = 0  # rows of the store that are scored
    token_bytes: NDArray[np.uint32] | None = None


AnyPrepared = Prepared | PreparedQuestions | PreparedCode


def prepare_of_run(config: Config, store: TokenStore, comm: MPI.Intracomm | None) -> list[AnyPrepared]:
    """Read and check the tasks of [evaluation]. Collective over comm. Raises UserError.

    Problems are made with seed 0 whatever run.seed is, so that runs are measured by the same ones.
    """
    wanted = config.evaluation
    options = Options(problems=wanted.examples, limit=wanted.examples, shots=wanted.shots)
    about = About(config.model, config.data, store.tokenizer_json)
    return [prepare(parse_task(task), about, options, comm) for task in wanted.tasks]


def prepare(
    task: TaskName, about: About, options: Options, comm: MPI.Intracomm | None, judge: JudgeProcess | None = None
) -> AnyPrepared:
    """Read and check the input of a task; encode its examples. Collective over comm. Raises UserError.

    judge: of tasks that run programs.
    """
    if task.is_code:
        return prepare_code(task, about, options, comm, judge)
    if task.generates:
        return prepare_questions(task, about, options, comm)
    if task.is_store:
        assert task.path is not None
        return _prepare_store(task, TokenStore.open(task.path, comm), about, options, comm)
    examples: list[Example] = []

    def make() -> list[Request]:
        about.check_texts()
        examples[:] = examples_of(task, options)
        try:
            requests = requests_of(examples, Encoder(about.tokenizer_json), about.model.vocabulary)
            check_lengths(requests, about.model.max_sequence)
        except DataError as error:
            raise DataError(f"{task.text}: {error}") from error
        return requests

    return Prepared(task, examples, share_requests(make, comm))


def _prepare_store(
    task: TaskName, store: TokenStore, about: About, options: Options, comm: MPI.Intracomm | None
) -> Prepared:
    """Lay out the held-out split of an open store. Collective over comm. Raises UserError."""

    def check() -> None:
        if differ := other_token(about.tokenizer_json, store.tokenizer_json):
            raise DataError(f"{task.text} was not tokenized as the model has learned it: {differ}")
        if about.model.vocabulary < store.vocabulary:
            raise DataError(f"{task.text} has {store.vocabulary} tokens, the model {about.model.vocabulary}")

    on_root(comm, check)
    data = about.data
    rows = make_rows(SplitArrays.of(store, "validation"), data.sequence_length, data.packing, data.document_mask, comm)
    count = min(rows.count, options.limit or rows.count)
    if not count:
        raise DataError(f"the held-out split of {task.text} has no row of {data.sequence_length} tokens")
    return Prepared(task, rows=rows, count=count, token_bytes=store.token_bytes)


def measure(scorer: Scorer, prepared: AnyPrepared, batch_tokens: int, progress: Progress) -> Result | None:
    """Score a task and make its figures; None on all ranks but rank 0. Collective over the scorer's mesh.

    Raises NonFiniteError, StallError; ConfigError where there is too little memory for texts.
    """
    if isinstance(prepared, PreparedQuestions):
        return measure_questions(scorer, prepared, progress)
    if isinstance(prepared, PreparedCode):
        return measure_code(scorer, prepared, progress)
    is_root = not (scorer.mesh and scorer.mesh.world.rank)
    if prepared.rows is not None:
        found = _score_store(scorer, prepared, batch_tokens, progress)
        return _result_of_store(prepared.task, found) if is_root else None
    batches = batches_of_requests(prepared.requests, scorer.model.max_sequence, batch_tokens)
    with progress(prepared.task.text, len(batches)) as advance:
        scores = scorer.scores(batches, len(prepared.requests), advance)
    return result_of(prepared.task, prepared.examples, scores) if is_root else None


def _score_store(scorer: Scorer, prepared: Prepared, batch_tokens: int, progress: Progress) -> NDArray[np.float64]:
    rows, count = prepared.rows, prepared.count
    assert rows is not None
    size = max(1, batch_tokens // rows.sequence)
    batches = -(-count // size)
    with progress(prepared.task.text, batches) as advance:
        return scorer.sums(
            lambda number: batch_of_rows(rows, number * size, min(size, count - number * size)),
            batches, count, prepared.token_bytes, advance,
        )  # fmt: skip


def _result_of_store(task: TaskName, found: NDArray[np.float64]) -> Result:
    """Make figures of (rows, 4): nats, misses, targets, bytes. Raises DataError if no target counts."""
    nats, misses, targets, text_bytes = found.T
    if not targets.sum() or not text_bytes.sum():
        raise DataError(f"the held-out split of {task.text} has no target that counts and stands for text")
    loss = ratio(nats, targets)
    figures = {"loss": loss, "perplexity": exponential(loss)}
    figures["bits_per_byte"] = ratio(nats / math.log(2), text_bytes)
    figures["token_acc"] = ratio(targets - misses, targets)
    return Result(task.text, task.kind, len(found), figures)
