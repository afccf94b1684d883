"""python -m hpcllm.perf: the commands, in one table. Nothing heavy is imported before a command is known to be run.

Exit codes: 0 done (also when a signal ended a measurement early), 1 failed or --check found an error, 2 user error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from hpcllm.errors import ConfigError, HpcllmError

ARGUMENTS = "hpcllm.perf.arguments"
COLLECTIVE = ("hpcllm.perf.collective", ARGUMENTS, "add_collective_arguments")
COMMANDS = {  # name: (help, (module that runs it, module of its arguments, function that adds them))
    "allreduce": ("time the sum of every rank's array on every rank", COLLECTIVE),
    "reduce_scatter": ("time the sum of every rank's array, each rank its part", COLLECTIVE),
    "allgather": ("time every rank's part on every rank", COLLECTIVE),
    "alltoall": ("time another block from every rank to every rank", COLLECTIVE),
    "broadcast": ("time one rank's array on every rank", COLLECTIVE),
    "p2p": ("time messages between two ranks", ("hpcllm.perf.p2p", ARGUMENTS, "add_arguments")),
    "codec": ("time encode and decode in one process", ("hpcllm.perf.codec", ARGUMENTS, "add_codec_arguments")),
    "step": ("time training steps", ("hpcllm.perf.step", ARGUMENTS, "add_step_arguments")),
    "tune": ("measure this allocation for `auto`", ("hpcllm.perf.tune",) * 2 + ("add_arguments",)),
    "plot": ("draw saved records, or print them as Markdown", ("", "hpcllm.perf.picture", "add_arguments")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser(words[0] if words else "").parse_args(words)
    try:
        code: int = _runner(arguments.command)(arguments)
        sys.stdout.flush()
        return code
    except HpcllmError as error:
        print(f"hpcllm: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `plot --markdown | head`
        sys.stderr.close()
        return 0


def _parser(command: str) -> argparse.ArgumentParser:
    """Of all commands; only the one that is asked for gets its arguments, as it brings its modules."""
    parser = argparse.ArgumentParser(
        prog="python -m hpcllm.perf",
        description="Measure the collectives, codecs and links of this allocation.",
        epilog="In a batch job: srun python -m hpcllm.perf allreduce --json allreduce.json --plot allreduce.png",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, (summary, (_, module, function)) in COMMANDS.items():
        own = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == command:
            getattr(import_module(module), function)(own)
    return parser


def _runner(command: str) -> Callable[[argparse.Namespace], int]:
    if command == "plot":
        return _plot
    return _step_or_tune if command in ("step", "tune") else _measure


def _measure(arguments: argparse.Namespace) -> int:
    from hpcllm.binding import bind_job
    from hpcllm.job import StopSignals, run_job
    from hpcllm.perf.arguments import options_of

    def job(world) -> int:  # type: ignore[no-untyped-def]
        options = options_of(arguments)
        bind_job(world)
        module = import_module(COMMANDS[arguments.command][1][0])
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
    from hpcllm.binding import bind_job
    from hpcllm.job import run_job

    module = import_module(COMMANDS[arguments.command][1][0])

    def job(world) -> int:  # type: ignore[no-untyped-def]
        bind_job(world)
        code: int = module.run(arguments, world)
        return code

    return run_job(job)


def _plot(arguments: argparse.Namespace) -> int:
    """Without MPI: on a login node, too."""
    from hpcllm.perf.arguments import picture_path
    from hpcllm.perf.picture import draw
    from hpcllm.perf.records import check_writable, read_json
    from hpcllm.perf.table import markdown

    if not arguments.output and not arguments.markdown:
        raise ConfigError("plot: nothing to do; valid: -o PICTURE.png, --markdown, or both")
    picture = picture_path(arguments.output) if arguments.output else None
    check_writable(picture)
    records = [record for path in arguments.files for record in read_json(Path(path))]
    if arguments.markdown:
        print(markdown(records), end="")
    if picture:
        draw(records, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
