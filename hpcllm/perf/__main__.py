"""python -m hpcllm.perf: the commands, in one table. Nothing heavy is imported before a command is known to be run.

Exit codes: 0 done (also when a signal ended a measurement early), 1 failed or --check found an error, 2 user error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.system.job import StopSignals, run_job, run_with_or_without_mpi

COLLECTIVE = ("collective", "add_collective_arguments")
COMMANDS = {  # name: (help, (module that runs it, function that adds its options))
    "allreduce": ("time the sum of every rank's array on every rank", COLLECTIVE),
    "reduce_scatter": ("time the sum of every rank's array, each rank its part", COLLECTIVE),
    "allgather": ("time every rank's part on every rank", COLLECTIVE),
    "alltoall": ("time another block from every rank to every rank", COLLECTIVE),
    "broadcast": ("time one rank's array on every rank", COLLECTIVE),
    "p2p": ("time messages between two ranks", ("p2p", "add_p2p_arguments")),
    "codec": ("time encode and decode in one process", ("codec", "add_codec_arguments")),
    "step": ("time training steps", ("step", "add_step_arguments")),
    "tune": ("measure this allocation for `auto`", ("tune", "add_tune_arguments")),
    "plot": ("draw saved records, or print them as Markdown", ("", "add_plot_arguments")),
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
        arguments = _parser(words[0] if words else "").parse_args(words)
    except ConfigError as error:
        rejected = error

        def fail(_: object) -> int:
            raise rejected

        return run_with_or_without_mpi(fail)  # all ranks made the same mistake: it is said once
    if arguments.command == "plot":
        return _plot(arguments)
    return (_step_or_tune if arguments.command in ("step", "tune") else _measure)(arguments)


def _parser(command: str) -> argparse.ArgumentParser:
    """Parser of all commands; only the requested one gets its options, as they bring modules."""
    parser = argparse.ArgumentParser(
        prog="python -m hpcllm.perf",
        description="Measure the collectives, codecs and links of this allocation.",
        epilog="In a batch job: srun python -m hpcllm.perf allreduce --json allreduce.json --plot allreduce.png",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, (summary, (_, add_options)) in COMMANDS.items():
        own = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == command:
            getattr(import_module("hpcllm.perf.arguments"), add_options)(own)
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    from hpcllm.perf.arguments import options_of
    from hpcllm.system.affinity import set_affinity_of_job

    def job(world) -> int:  # type: ignore[no-untyped-def]
        options = options_of(arguments)
        set_affinity_of_job(world)
        module = import_module(f"hpcllm.perf.{COMMANDS[arguments.command][1][0]}")
        code: int = module.run(arguments.command, options, world, lambda: bool(signals.received))
        if signals.received and world.rank == 0:
            print(f"hpcllm: stopped by {signals.received}; what is above was measured", file=sys.stderr)
        return code

    with StopSignals() as signals:
        code = run_job(job)
        if signals.received:
            signals.keep_out()
        return code


def _step_or_tune(arguments: argparse.Namespace) -> int:
    from hpcllm.system.affinity import set_affinity_of_job

    module = import_module(f"hpcllm.perf.{COMMANDS[arguments.command][1][0]}")

    def job(world) -> int:  # type: ignore[no-untyped-def]
        set_affinity_of_job(world)
        code: int = module.run(arguments, world)
        return code

    return run_job(job)


def _plot(arguments: argparse.Namespace) -> int:
    """Draw or print saved records, without MPI: on a login node, too."""
    from hpcllm.perf.picture import draw
    from hpcllm.perf.records import check_writable, markdown, read_json

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
