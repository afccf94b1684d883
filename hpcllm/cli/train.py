"""The command `train`; with --dry-run it only says what would run (dry_run.py)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from hpcllm.cli.options import add_json, add_run_file
from hpcllm.errors import ConfigError

if TYPE_CHECKING:
    from hpcllm.training.summary import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Train as a run file says. On a run folder with a checkpoint it goes on from the newest one."
    add_run_file(parser)
    parser.add_argument("--restart", action="store_true", help="begin at step 0; the old run folder is renamed")
    words = "check all that train checks before it begins; start and write nothing"
    parser.add_argument("--dry-run", action="store_true", help=words)
    words = "of the job to check, with --dry-run (default: those launched, or dp x pp x tp)"
    parser.add_argument("--ranks", type=int, metavar="N", help=words)
    add_json(parser, "print the closing table as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train, or with --dry-run check what train checks. Raises UserError."""
    if arguments.dry_run:
        from hpcllm.cli.dry_run import run as try_out

        return try_out(arguments)
    if arguments.ranks is not None:
        raise ConfigError("--ranks is for --dry-run; the ranks of a run are those that mpirun or srun starts")
    from hpcllm.system.job import TO_BE_CONTINUED, StopSignals, run_job

    def job(world) -> int:  # type: ignore[no-untyped-def]
        from hpcllm.config import schema as config
        from hpcllm.mpi.collective_errors import on_root

        tables = on_root(world, lambda: config.to_tables(config.load(arguments.run, arguments.overrides)))
        checked = config.from_tables(tables)
        from hpcllm.preflight.examination import start
        from hpcllm.training.loop import train as run  # after the run file is known to be right: it takes seconds

        start(world, checked.run.device, checked.limits.stall_s)
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            summary = run(checked, world, signals, arguments.restart)
        if world.rank == 0:
            print(json.dumps(summary.as_dict()) if arguments.json else f"\n{summary.text()}", flush=True)
        signals.keep_out()  # all is done; and a job that is requeued is ended at once
        if not summary.stopped_by:
            return 0
        on_root(world, lambda: print(_what_goes_on(summary), file=sys.stderr if arguments.json else None, flush=True))
        return TO_BE_CONTINUED

    with StopSignals() as signals:
        return run_job(job)


def _what_goes_on(summary: Summary) -> str:
    """Last line of a run that has stopped; the job is put back into the queue if the run file says so."""
    from hpcllm.system.slurm import requeue_job

    if summary.config.run.requeue:
        return requeue_job(summary.not_requeued)
    return "the same command goes on from the checkpoint"
