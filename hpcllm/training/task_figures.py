"""Figures of tasks while a run trains: those of `hpcllm evaluate`, of the weights as they are, by the run's own ranks.

    start      evaluation.tasks -> files, examples, tokens; what is wrong ends the run before its first step
    step n     chunks of each rank -- evaluation/scoring.py --> figures --> log.jsonl, trackers, a line for people

    {"step": 40, "evaluation/reverse:5/acc": 0.31, "evaluation/reverse:5/acc_stderr": 0.03, ...}

Nothing is coded on the way between ranks: a layout's codecs show in the weights alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcllm.evaluation.batches import BATCH_TOKENS
from hpcllm.evaluation.measuring import AnyPrepared, measure, prepare_of_run
from hpcllm.evaluation.scoring import Advance, Scorer
from hpcllm.evaluation.tasks import Result
from hpcllm.training.log import Log, Record
from hpcllm.training.setup import RunContext


@dataclass(frozen=True)
class TaskFigures:
    """Tasks of a run, ready to be measured."""

    scorer: Scorer
    prepared: Sequence[AnyPrepared]

    def measure(self, log: Log | None, step: int) -> None:
        """Measure every task and log the figures. Collective over the mesh. Raises NonFiniteError, StallError."""
        for each in self.prepared:
            result = measure(self.scorer, each, BATCH_TOKENS, _silent)
            if log and result:
                log.write({"step": step, **_record(result)})
                log.print(f"step {step:>6}/{log.bar.total}  {_words(result)}")


def open_tasks(run: RunContext) -> TaskFigures:
    """Read and check the tasks of a run. Collective over the mesh. Raises UserError."""
    prepared = prepare_of_run(run.config, run.store, run.mesh.world)
    decoders = [chunk.decoder for chunk in run.engine.chunks]
    shares_weights = run.config.optimizer.shard == "all"
    scorer = Scorer(decoders, run.mesh, run.engine.link.placement, run.control, shares_weights)
    return TaskFigures(scorer, prepared)


def _record(result: Result) -> Record:
    """Name the figures of a task, with their standard errors."""
    found: Record = {}
    for name, figure in result.figures.items():
        facts = figure.as_dict()
        for suffix, key in (("", "value"), ("_stderr", "stderr")):
            if facts[key] is not None:
                found[f"evaluation/{result.task}/{name}{suffix}"] = facts[key]
    return found


def _words(result: Result) -> str:
    parts = [f"{name} {figure.value:.4f}" for name, figure in result.figures.items() if name != "perplexity"]
    return "  ".join([result.task, *parts])


@contextlib.contextmanager
def _silent(_label: str, _batches: int) -> Iterator[Advance]:
    yield lambda _: None
