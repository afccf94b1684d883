"""Tasks made ready, and measured by a model that is there: loaded by `hpcllm evaluate`, or in training.

name --> examples --> requests, on all ranks --> Scorer --> scores --> rank 0: figures
name --> open store --> rows ---------------> sums of rows ----------------^     store_task.py
name --> questions --> prompts --> texts ----------------------------------^     question_task.py
name --> problems --> prompts --> programs --> outcomes -------------------^     code_task.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcllm.config.schema import Config
from hpcllm.data.store import TokenStore
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Request, batches_of_requests, check_lengths
from hpcllm.evaluation.code_task import PreparedCode, measure_code, prepare_code
from hpcllm.evaluation.example_tokens import requests_of
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.question_task import PreparedQuestions, measure_questions, prepare_questions
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import About, Options, Progress
from hpcllm.evaluation.sharing import share_requests
from hpcllm.evaluation.store_task import PreparedStore, measure_store, prepare_store
from hpcllm.evaluation.tasks import Result, TaskName, examples_of, parse_task, result_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.evaluation.judge_process import JudgeProcess


@dataclass(frozen=True)
class Prepared:
    """A task whose input is checked: requests on all ranks, examples on rank 0 alone."""

    task: TaskName
    examples: Sequence[Example]
    requests: Sequence[Request]


AnyPrepared = Prepared | PreparedStore | PreparedQuestions | PreparedCode


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
        return prepare_store(task, about, options, comm)
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


def measure(scorer: Scorer, prepared: AnyPrepared, batch_tokens: int, progress: Progress) -> Result | None:
    """Score a task and make its figures; None on all ranks but rank 0. Collective over the scorer's mesh.

    Raises NonFiniteError, StallError; ConfigError where there is too little memory for texts.
    """
    if isinstance(prepared, PreparedQuestions):
        return measure_questions(scorer, prepared, progress)
    if isinstance(prepared, PreparedCode):
        return measure_code(scorer, prepared, progress)
    if isinstance(prepared, PreparedStore):
        return measure_store(scorer, prepared, batch_tokens, progress)
    batches = batches_of_requests(prepared.requests, scorer.model.max_sequence, batch_tokens)
    with progress(prepared.task.text, len(batches)) as advance:
        scores = scorer.scores(batches, len(prepared.requests), advance)
    if scorer.mesh and scorer.mesh.world.rank:
        return None
    return replace(result_of(prepared.task, prepared.examples, scores), cut=_cut(prepared, scorer.model.max_sequence))


def _cut(prepared: Prepared, max_sequence: int) -> int:
    """Count the examples that have a context which batches_of_requests cuts."""
    of_choices = iter(prepared.requests)
    return sum(
        max(sum(map(len, next(of_choices))) for _ in each.choices) > max_sequence + 1 for each in prepared.examples
    )
