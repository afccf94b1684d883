"""python -m hpcllm.perf: the commands, in one table. Nothing heavy is imported before a command is known to be run.

Exit codes: 0 done (also when a signal ended a measurement early), 1 failed or --check found an error, 2 user error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hpcllm.errors import ConfigError, HpcllmError
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
from hpcllm.perf.records import check_writable, markdown, read_json
from hpcllm.system.affinity import set_affinity_of_job
from hpcllm.system.job import StopSignals, run_job, run_with_or_without_mpi

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
    "plot": ("", add_plot_arguments, "draw saved records, or print them as Markdown"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _parse_and_run(words)
        sys.stdout.flush()
        return code
    except HpcllmError as error:
        print(f"hpcllm: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `plot --markdown | head`
        sys.stderr.close()
        return 0


def _parse_and_run(words: list[str]) -> int:
    try:
        arguments = _parser().parse_args(words)
    except ConfigError as error:
        rejected = error

        def fail(_: object) -> int:
            raise rejected

        return run_with_or_without_mpi(fail)  # all ranks made the same mistake: it is said once
    if arguments.command == "plot":
        return _plot(arguments)
    return (_step_or_tune if arguments.command in ("step", "tune") else _measure)(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcllm.perf",
        description="Measure the collectives, codecs and links of this allocation.",
        epilog="In a batch job: srun python -m hpcllm.perf allreduce --json allreduce.json --plot allreduce.png",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, (_, add_options, summary) in COMMANDS.items():
        add_options(commands.add_parser(name, help=summary, description=f"{summary.capitalize()}."))
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    def job(world) -> int:  # type: ignore[no-untyped-def]
        options = options_of(arguments)
        set_affinity_of_job(world)
        code: int = _module(arguments).run(arguments.command, options, world, lambda: bool(signals.received))
        if signals.received and world.rank == 0:
            print(f"hpcllm: stopped by {signals.received}; what is above was measured", file=sys.stderr)
        return code

    with StopSignals() as signals:
        code = run_job(job)
        if signals.received:
            signals.keep_out()
        return code


def _step_or_tune(arguments: argparse.Namespace) -> int:
    def job(world) -> int:  # type: ignore[no-untyped-def]
        set_affinity_of_job(world)
        code: int = _module(arguments).run(arguments, world)
        return code

    return run_job(job)


def _module(arguments: argparse.Namespace) -> Any:
    """Module of a command, which loads torch: imported when the command is known to be run."""
    return import_module(f"hpcllm.perf.{COMMANDS[arguments.command][0]}")


def _plot(arguments: argparse.Namespace) -> int:
    """Draw or print saved records, without MPI: on a login node, too."""
    if not arguments.output and not arguments.markdown:
        raise ConfigError("plot: nothing to do; valid: -o PICTURE.png, --markdown, or both")
    check_writable(arguments.output)
    records = [record for path in arguments.files for record in read_json(path)]
    if arguments.markdown:
        print(markdown(records), end="")
    if arguments.output:
        draw(records, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
