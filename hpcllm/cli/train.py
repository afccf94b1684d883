"""The command `train`; with --dry-run it only says what would run (dry_run.py)."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import add_run_file, count
from hpcllm.errors import ConfigError, UserError
from hpcllm.system.output import add_output, is_json_alone, show

if TYPE_CHECKING:
    from hpcllm.config.schema import Config
    from hpcllm.finetuning.reward_process import RewardProcess
    from hpcllm.training.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Train as a run file says. On a run folder with a checkpoint it goes on from the newest one."
    add_options(parser, check)


def check(config: Config) -> None:
    """Raise ConfigError if the run file is of a fine-tuning."""
    if config.finetuning.kind != "none":
        raise ConfigError(
            f"finetuning.kind = {config.finetuning.kind!r} is for `hpcllm finetune`, which takes the same options; "
            "valid for train: 'none'"
        )


def add_options(parser: argparse.ArgumentParser, check: Callable[[Config], None]) -> None:
    """Add the options that train and finetune share. check: raises ConfigError for a run file of the other one."""
    parser.set_defaults(check=check)
    add_run_file(parser)
    parser.add_argument("--restart", action="store_true", help="begin at step 0; the old run folder is renamed")
    parser.add_argument("--report", action="store_true", help="write the page of the run once it is finished")
    words = "check all that train checks before it begins; start and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=words)
    words = "only say whether the run has made and saved its last step: exit code 0 if so, else 1"
    parser.add_argument("--is-finished", action="store_true", help=words)
    words = "of the job to check, with --dry-run (default: those launched, or dp x pp x tp)"
    parser.add_argument("--ranks", type=count, metavar="N", help=words)
    add_output(parser, "the closing table as JSON")


def run(arguments: argparse.Namespace, rewards: RewardProcess | None = None) -> int:
    """Train; or with --dry-run check what it checks, with --is-finished look for its end. Raises UserError.

    rewards: the process of a run that learns from them.
    """
    if arguments.is_finished:
        if arguments.dry_run or arguments.ranks is not None:
            raise ConfigError("--is-finished only looks into the run folder; it does not go with --dry-run or --ranks")
        return _look_for_the_end(arguments)
    if arguments.dry_run:
        from hpcllm.cli.dry_run import run as try_out

        return try_out(arguments)
    if arguments.ranks is not None:
        raise ConfigError("--ranks is for --dry-run; the ranks of a run are those that mpirun or srun starts")
    from hpcllm.system.job import TO_BE_CONTINUED, StopSignals, run_job

    def job(world) -> int:  # type: ignore[no-untyped-def]
        from hpcllm.config import schema as config
        from hpcllm.mpi.collective_errors import on_root

        def load() -> dict[str, dict[str, Any]]:
            found = config.load(arguments.run, arguments.overrides)
            arguments.check(found)
            return config.to_tables(found)

        checked = config.from_tables(on_root(world, load))
        from hpcllm.mpi.wait import job_waits

        job_waits.limit_s = checked.limits.stall_s
        from hpcllm.plan.resolve import check_launch
        from hpcllm.system.quick_imports import quick_imports

        on_root(world, lambda: check_launch(checked, world.size))
        with quick_imports():  # torch: seconds and thousands of files, so only for a launch that can be right
            from hpcllm.finetuning.objectives import objective_of
            from hpcllm.preflight.examination import start
            from hpcllm.training.loop import train as run

        start(world, checked.run.device, checked.limits.stall_s)
        with contextlib.redirect_stdout(sys.stderr if is_json_alone(arguments) else sys.stdout):
            summary = run(checked, world, signals, arguments.restart, arguments.wide, objective_of(checked, rewards))
        if world.rank == 0:
            # not folded: its commands are to be copied
            show(arguments, summary.as_dict(), ["", summary.text()], wide=True)
        if world.rank == 0 and arguments.report and not summary.stopped_by:
            _write_page(summary)
        signals.keep_out()  # all is done; and a job that is requeued is ended at once
        if not summary.stopped_by:
            return 0
        on_root(
            world,
            lambda: print(_what_goes_on(summary), file=sys.stderr if is_json_alone(arguments) else None, flush=True),
        )
        return TO_BE_CONTINUED

    with StopSignals() as signals:
        return run_job(job, _first_limit_s(arguments))


def _first_limit_s(arguments: argparse.Namespace) -> float:
    """Return limits.stall_s for MPI's own start, before rank 0 has checked the run file; its default if in doubt."""
    from hpcllm.config.schema import LimitsConfig, load

    try:
        if not arguments.run.is_file():  # a pipe can be read only once
            return LimitsConfig().stall_s
        return load(arguments.run, arguments.overrides).limits.stall_s
    except (UserError, OSError, ValueError):
        return LimitsConfig().stall_s  # what is wrong is said by rank 0


def _look_for_the_end(arguments: argparse.Namespace) -> int:
    """Tell whether the run is finished, by its own record; of launched ranks each looks for itself."""
    from hpcllm.config.schema import load
    from hpcllm.training.finished import read_progress

    run = load(arguments.run, arguments.overrides).run
    progress = read_progress(Path(run.folder) / run.name, run.steps)
    show(arguments, progress.as_dict(), [progress.line()])
    return 0 if progress.is_finished else 1


def _write_page(summary: Summary) -> None:
    """Write the report, and tell on standard error where it is; a run does not fail for it."""
    from hpcllm.cli.report import write_page

    try:
        lines = write_page(Path(summary.config.run.folder) / summary.config.run.name)
    except UserError as error:
        lines = [f"no report: {error}"]
    print("\n".join(["", *lines]), file=sys.stderr, flush=True)


def _what_goes_on(summary: Summary) -> str:
    """Last line of a run that has stopped; the job is put back into the queue if the run file says so."""
    from hpcllm.system.slurm import requeue_job

    if summary.config.run.requeue:
        return requeue_job(summary.not_requeued)
    return "the same command goes on from the checkpoint"
