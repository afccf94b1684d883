"""`python -m hpcllm.perf` and `hpcllm perf`: the commands, in one table. What is heavy is imported by what needs it.

Exit codes: 0 done (also when a signal ended a measurement early), 1 failed or --check found an error, 2 user error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from hpcllm.errors import ConfigError
from hpcllm.perf.arguments import (
    add_codec_arguments,
    add_collective_arguments,
    add_p2p_arguments,
    add_plot_arguments,
    add_step_arguments,
    add_tune_arguments,
    options_of,
)
from hpcllm.perf.picture import draw
from hpcllm.perf.records import markdown, read_json
from hpcllm.system.affinity import set_affinity_of_job
from hpcllm.system.command_line import Parser, add_stall_limit, run_command
from hpcllm.system.job import WAIT_LIMIT_S, StopSignals, run_job
from hpcllm.system.output import check_writable, is_json_alone, write_json
from hpcllm.system.quick_imports import quick_imports

COMMANDS = {  # name: (module that runs it, function that adds its options, help)
    "allreduce": ("collective", add_collective_arguments, "time the sum of every rank's array on every rank"),
    "reduce_scatter": (
        "collective",
        add_collective_arguments,
        "time the sum of every rank's array, each rank its part",
    ),
    "allgather": ("collective", add_collective_arguments, "time every rank's part on every rank"),
    "alltoall": ("collective", add_collective_arguments, "time another block from every rank to every rank"),
    "broadcast": ("collective", add_collective_arguments, "time one rank's array on every rank"),
    "p2p": ("p2p", add_p2p_arguments, "time messages between two ranks"),
    "codec": ("codec", add_codec_arguments, "time encode and decode in one process"),
    "step": ("step", add_step_arguments, "time training steps"),
    "tune": ("tune", add_tune_arguments, "measure this allocation for `auto`"),
    "plot": ("", add_plot_arguments, "draw saved records, or print them as Markdown or JSON"),
}

ALONE = ("codec", "plot")  # no rank waits for another


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    return run_command(_parser, sys.argv[1:] if argv is None else argv)


def _parser(_: Sequence[str]) -> Parser:
    parser = Parser(prog="python -m hpcllm.perf")
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands."""
    parser.description = "Measure the collectives, codecs and links of this allocation."
    parser.epilog = "In a batch job: srun python -m hpcllm.perf allreduce --json allreduce.json --plot allreduce.png"
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="perf_command")
    for name, (_, add_options, summary) in COMMANDS.items():
        own = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        add_options(own)
        if name not in ALONE:
            add_stall_limit(own)
        own.set_defaults(command=RUN.get(name, _measure))


def _measure(arguments: argparse.Namespace) -> int:
    def job(world) -> int:  # type: ignore[no-untyped-def]
        options = options_of(arguments)
        set_affinity_of_job(world)
        code: int = _module(arguments).run(arguments.perf_command, options, world, lambda: bool(signals.received))
        if signals.received and world.rank == 0:
            print(f"hpcllm: stopped by {signals.received}; what is above was measured", file=sys.stderr)
        return code

    with StopSignals() as signals:
        code = run_job(job, vars(arguments).get("stall_s", WAIT_LIMIT_S))
        if signals.received:
            signals.keep_out()
        return code


def _step_or_tune(arguments: argparse.Namespace) -> int:
    def job(world) -> int:  # type: ignore[no-untyped-def]
        set_affinity_of_job(world)
        code: int = _module(arguments).run(arguments, world)
        return code

    return run_job(job, arguments.stall_s)


def _module(arguments: argparse.Namespace) -> Any:
    """Module of a command, which loads torch: imported when the command is known to be run."""
    with quick_imports():
        return import_module(f"hpcllm.perf.{COMMANDS[arguments.perf_command][0]}")


def _plot(arguments: argparse.Namespace) -> int:
    """Draw or print saved records, without MPI: on a login node, too."""
    if not (arguments.plot or arguments.markdown or arguments.json):
        raise ConfigError("plot: nothing to do; valid: --plot PICTURE.png, --markdown, --json, or several of them")
    if arguments.markdown and is_json_alone(arguments):
        raise ConfigError("plot: --markdown and --json both print; valid: --json FILE.json beside --markdown")
    check_writable(arguments.plot)
    records = [record for path in arguments.files for record in read_json(path)]
    if arguments.json:
        write_json(arguments, [asdict(record) for record in records])
    if arguments.markdown:
        print(markdown(records), end="")
    if arguments.plot:
        draw(records, arguments.plot)
    return 0


RUN = {"step": _step_or_tune, "tune": _step_or_tune, "plot": _plot}  # the others: _measure

if __name__ == "__main__":
    sys.exit(main())
