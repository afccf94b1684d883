"""The command `evaluate`: figures of a model by tasks, in one process or on as many ranks as there are.

one process        no MPI at all
N ranks            N / (tp x pp) replicas share the examples; rank 0 prints
--all-checkpoints  each checkpoint of a run folder, a line each
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import count, count_to, file_or_folder, whole
from hpcllm.config.rules import MOST_SHOTS, MOST_TASKS, Range
from hpcllm.errors import ConfigError, MeshError
from hpcllm.plotting import picture_path
from hpcllm.system.command_line import add_stall_limit, real
from hpcllm.system.job import launched_ranks, run_job
from hpcllm.system.output import add_output, check_writable, show
from hpcllm.system.text import printable, printable_path, table

MOST_OUTCOMES = 8  # that are shown of programs

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.evaluation.judge_process import JudgeProcess
    from hpcllm.evaluation.scoring import Advance
    from hpcllm.evaluation.settings import Options
    from hpcllm.evaluation.tasks import Result, TaskName
    from hpcllm.mpi.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Measure a model: held-out loss of token stores, multiple choice by log-likelihood, fixed answers, answers "
        "that it writes, problems made with a seed. Ranks share the examples under mpirun or srun; the figures are "
        "the same on any number."
    )
    add, words = parser.add_argument, "a checkpoint, a run folder, or a Hugging Face folder"
    add("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=words)
    words = (
        "a token store, a file of examples, FORMAT=FILE of a benchmark (arc, hellaswag, mmlu, ...), or problems: copy, "
        "reverse, sort, addition, induction, needle, with a size as in sort:8; generate=FILE, gsm8k=FILE, ... or "
        "generate=sort:8: the model writes the answers; humaneval: it writes programs; may be repeated"
    )
    add("--task", action="append", required=True, metavar="TASK", dest="tasks", help=words)
    add("--limit", type=count, metavar="N", help="at most so many examples of a file, rows of a store (default: all)")
    add(
        "--problems",
        type=count_to(1_000_000),
        default=200,
        metavar="N",
        help="so many of each task that is made (default: 200)",
    )
    add("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of made problems and of shots (default: 0)")
    words = "examples with their answers in front of each question, drawn by --seed (default: 0)"
    add("--shots", type=whole(0, MOST_SHOTS), default=0, metavar="K", help=words)
    words = "draw them from this file, of the task's format (default: the other rows of the task's own)"
    add("--shots-from", type=file_or_folder, metavar="FILE", help=words)
    words = "of an answer that the model writes, at most (default: 256, of problems as many as the longest answer)"
    add("--tokens", type=whole(1, 1 << 24), metavar="N", help=words)
    add("--all-checkpoints", action="store_true", help="of a run folder, each checkpoint")
    words = "with --all-checkpoints, draw the figures over the steps: .svg or .png"
    add("--plot", type=picture_path, metavar="FILE", help=words)
    _add_code(parser)
    add("--tp", type=count, default=1, metavar="N", help="ranks that share each layer (default: 1)")
    add("--pp", type=count, default=1, metavar="N", help="stages of layers (default: 1)")
    words = "what to compute in (default: fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=words)
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one (default)")
    words = "tokens that are run forward at once (default: 4096)"
    add("--batch-tokens", type=whole(1, 1 << 24), default=4096, metavar="N", help=words)
    add_stall_limit(parser)
    add_output(parser, "the figures with their errors as JSON")


def _add_code(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("code (humaneval)")
    add = group.add_argument
    add("--samples", type=count_to(1000), default=1, metavar="N", help="texts of each problem (default: 1)")
    words = "of the draws; 0: the likeliest text (default: 0 for one sample, else 0.8)"
    add("--temperature", type=real(Range(0, 1e9)), metavar="T", help=words)
    words = "the chance that one of K samples passes; may be repeated (default: 1)"
    add("--k", type=count_to(1000), action="append", metavar="K", help=words)
    add("--time-s", type=real(Range(0.1, 3600)), default=5.0, metavar="S", help="of each program (default: 5)")
    words = "memory of each program (default: 512)"
    add("--memory-mib", type=whole(64, 1 << 20), default=512, metavar="MIB", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print. Raises UserError, CheckpointError, NonFiniteError, StallError."""
    from hpcllm.evaluation.judge_process import open_judge

    with open_judge(arguments.tasks) as judge:
        if arguments.tp * arguments.pp == 1 and launched_ranks() == 1:
            return _evaluate(arguments, None, judge)
        return run_job(lambda world: _on_ranks(arguments, world, judge), arguments.stall_s)


def _on_ranks(arguments: argparse.Namespace, world: MPI.Intracomm, judge: JudgeProcess | None) -> int:
    from hpcllm.config.schema import MeshConfig
    from hpcllm.mpi.mesh import open_mesh

    each = arguments.tp * arguments.pp
    if world.size % each:
        raise MeshError(
            f"--tp {arguments.tp} times --pp {arguments.pp} is {each}, which does not divide the "
            f"{world.size} rank{'s' if world.size > 1 else ''} of the job; start it with a multiple of {each}"
        )
    with open_mesh(world, MeshConfig(dp=world.size // each, pp=arguments.pp, tp=arguments.tp)) as mesh:
        return _evaluate(arguments, mesh, judge)


def _evaluate(arguments: argparse.Namespace, mesh: Mesh | None, judge: JudgeProcess | None) -> int:
    from hpcllm.mpi.collective_errors import on_root
    from hpcllm.system.quick_imports import quick_imports

    with quick_imports():
        from hpcllm.evaluation.evaluate import evaluate
        from hpcllm.evaluation.tasks import parse_task

    if arguments.plot and not arguments.all_checkpoints:
        raise ConfigError("--plot draws figures over steps: give --all-checkpoints as well")
    check_writable(arguments.plot)
    if len(arguments.tasks) > MOST_TASKS:
        raise ConfigError(f"{len(arguments.tasks)} tasks; valid: up to {MOST_TASKS} in one call")
    tasks = [parse_task(text) for text in dict.fromkeys(arguments.tasks)]
    _check_shots(arguments, tasks)
    options = _options(arguments)
    prints = mesh is None or mesh.world.rank == 0
    paths = on_root(mesh.world if mesh else None, lambda: _paths(arguments))
    reports = []
    for path in paths:
        start_s = time.perf_counter()
        results = evaluate(path, tasks, options, mesh, Bars(prints), judge)
        reports.append(_report(path, results, mesh, time.perf_counter() - start_s))
    if prints:
        if arguments.plot:
            from hpcllm.evaluation.picture import draw

            draw(reports, arguments.plot)
        lines = _lines(reports[0]["tasks"]) if len(reports) == 1 else _comparison(reports)
        show(arguments, reports if arguments.all_checkpoints else reports[0], lines)
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    from hpcllm.evaluation.sandbox import Limits
    from hpcllm.evaluation.settings import CodeOptions, Options

    limits = Limits(arguments.time_s, arguments.memory_mib << 20)
    code = CodeOptions(arguments.samples, arguments.temperature, tuple(dict.fromkeys(arguments.k or [1])), limits)
    keys = ("problems", "seed", "limit", "shots", "shots_from", "tokens", "precision", "device", "batch_tokens")
    return Options(code=code, **{key: getattr(arguments, key) for key in keys})


def _check_shots(arguments: argparse.Namespace, tasks: Sequence[TaskName]) -> None:
    """Raise ConfigError for --shots-from where it is not clear what for."""
    files = [task.text for task in tasks if task.path and not (task.is_store or task.is_code)]
    if arguments.shots_from and not (arguments.shots and len(files) == 1):
        raise ConfigError(
            f"--shots-from {printable_path(str(arguments.shots_from))} with --shots {arguments.shots} and {len(files)} "
            "files of examples; valid: with --shots 1 or more, and one file whose format it has"
        )


def _paths(arguments: argparse.Namespace) -> list[Path]:
    """Return the models to measure, the oldest first. Raises DataError, CheckpointError."""
    from hpcllm.checkpoint.folder import locate_all

    return locate_all(arguments.checkpoint)[::-1] if arguments.all_checkpoints else [arguments.checkpoint]


def _report(path: Path, results: Sequence[Result], mesh: Mesh | None, time_s: float) -> dict[str, Any]:
    from hpcllm.checkpoint.folder import step_of

    shape = mesh.shape if mesh else {"dp": 1, "pp": 1, "tp": 1}
    model = {"checkpoint": printable_path(str(path)), "step": step_of(path)}
    return model | {"tasks": [result.as_dict() for result in results], "mesh": shape, "time_s": time_s}


def _lines(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out one model: a line for each figure, groups under their task."""
    rows = []
    for task in tasks:
        rows += _rows(printable_path(task["task"]), task)
        for name, group in task.get("groups", {}).items():
            rows += _rows(f"  {printable(name) or '(none)'}", group)
        counted = sorted(task.get("outcomes", {}).items(), key=lambda each: -each[1])[:MOST_OUTCOMES]
        rows += [[f"  {printable(name)}", f"{number:,}", "", "", "", ""] for name, number in counted]
        rows += [["  beginning cut off", f"{task['cut']:,}", "", "", "", ""]] if "cut" in task else []
    return table(["task", "examples", "figure", "value", "stderr", "95 % interval"], rows, indent="", gap="  ")


def _rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for place, (key, figure) in enumerate(found["figures"].items()):
        interval = "-" if figure["low"] is None else f"{_number(figure['low'])} to {_number(figure['high'])}"
        first = ["", ""] if place else [name, f"{found['examples']:,}"]
        rows.append([*first, key, _number(figure["value"]), _number(figure["stderr"]), interval])
    return rows


def _comparison(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Lay out several models: a line for each, its loss or bits per byte and its shares in columns."""
    names = [(t["task"], key) for t in reports[0]["tasks"] for key in t["figures"] if key != "perplexity"]
    head = ["checkpoint", *(f"{printable_path(task)} {key}" for task, key in names)]
    rows = []
    for report in reports:
        by_name = {(t["task"], key): f["value"] for t in report["tasks"] for key, f in t["figures"].items()}
        rows.append([Path(report["checkpoint"]).stem, *(_number(by_name[name]) for name in names)])
    return table(head, rows, indent="")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"


class Bars:
    """Progress of tasks on standard error, of rank 0, if that is a terminal."""

    def __init__(self, prints: bool) -> None:
        self.prints = prints

    @contextlib.contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Advance]:
        if not (self.prints and sys.stderr.isatty()):
            yield lambda _: None
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=label, unit="batch", leave=False, file=sys.stderr) as bar:
            yield bar.update
