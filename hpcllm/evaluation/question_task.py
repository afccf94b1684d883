"""Tasks whose answers a model writes: questions made ready, and measured.

    rank 0   name --> questions --> prompts as tokens, to all ranks
    all      prompts --generating.py--> texts, greedily: the likeliest token each time
    rank 0   texts --patterns.py--> answers --> right or not --> figures, by group too

Of a file a text has --tokens at most; of made problems as many as the longest answer, so that a model that has learned
nothing costs no more than one that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.evaluation.batches import Tokens
from hpcllm.evaluation.example_tokens import prompts_of
from hpcllm.evaluation.generating import Prompts, make_texts
from hpcllm.evaluation.patterns import Search, search_all
from hpcllm.evaluation.questions import Question, rights
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import About, Options, Progress
from hpcllm.evaluation.sharing import share_rows
from hpcllm.evaluation.tasks import Result, TaskName, questions_of, result_of_rows
from hpcllm.mpi.collective_errors import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_STOP_SETS = 1000


@dataclass(frozen=True)
class PreparedQuestions:
    """A task whose input is checked: prompts on all ranks, questions on rank 0 alone."""

    task: TaskName
    questions: Sequence[Question]
    prompts: Prompts
    encoder: Encoder


def prepare_questions(task: TaskName, about: About, options: Options, comm: MPI.Intracomm | None) -> PreparedQuestions:
    """Read and check the questions of a task; encode their prompts. Collective over comm. Raises UserError."""
    questions: list[Question] = []

    def make() -> list[Tokens]:
        about.check_texts()
        questions[:] = questions_of(task, options)
        encoder = Encoder(about.tokenizer_json)
        most = _most_tokens(task, questions, encoder, about, options.tokens)
        numbers = {stops: number for number, stops in enumerate(_stop_sets(task, questions))}
        prompts = prompts_of([question.prompt for question in questions], encoder, about.model.vocabulary)
        return [*prompts, tuple(numbers[question.stops] for question in questions), (most,)]

    *prompts, chosen, (most,) = share_rows(make, comm)
    stops = on_root(comm, lambda: _stop_sets(task, questions))
    return PreparedQuestions(task, questions, Prompts(prompts, stops, chosen, most), Encoder(about.tokenizer_json))


def measure_questions(scorer: Scorer, prepared: PreparedQuestions, progress: Progress) -> Result | None:
    """Have the answers written and make the figures; None on all ranks but rank 0. Collective over the scorer's mesh.

    Raises ConfigError where there is too little memory, NonFiniteError, StallError.
    """
    with progress(prepared.task.text, prepared.prompts.groups) as advance:
        texts = make_texts(scorer, prepared.prompts, prepared.encoder, advance=advance)
    if scorer.mesh and scorer.mesh.world.rank:
        return None
    room = scorer.model.max_sequence - prepared.prompts.most
    return replace(_result(prepared, texts), cut=sum(len(tokens) > room for tokens in prepared.prompts.tokens))


def _result(prepared: PreparedQuestions, texts: Sequence[str]) -> Result:
    questions = prepared.questions
    readings = [(reading, text) for each, text in zip(questions, texts, strict=True) for reading in each.readings]
    answers = iter(search_all([Search(reading.pattern, text, reading.last) for reading, text in readings]))
    found = [[next(answers) for _ in question.readings] for question in questions]
    return result_of_rows(prepared.task, questions, rights(questions, found))


def _stop_sets(task: TaskName, questions: Sequence[Question]) -> list[tuple[str, ...]]:
    """Return the sets of stop strings that there are. Raises DataError for too many."""
    found = list(dict.fromkeys(question.stops for question in questions))
    if len(found) > MOST_STOP_SETS:
        raise DataError(f"{task.text} has {len(found):,} kinds of stop strings; valid: up to {MOST_STOP_SETS:,}")
    return found


def _most_tokens(
    task: TaskName, questions: Sequence[Question], encoder: Encoder, about: About, wanted: int | None
) -> int:
    """Return how many tokens a text has at most. Raises DataError for answers that the model cannot write."""
    if task.path is not None or wanted:
        return about.tokens_of(wanted)
    longest = max(len(ids) for ids in encoder.encode([f" {question.answers[0]}" for question in questions]))
    if longest >= about.model.max_sequence:
        raise DataError(
            f"{task.text}: an answer has {longest - 1} tokens, but the model reads {about.model.max_sequence} with the "
            "prompt; valid: a smaller size"
        )
    return longest
