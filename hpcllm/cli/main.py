"""The command line: which command runs, and how it ends.

    hpcllm COMMAND ... --> COMMAND.py of this folder: add_arguments(parser), run(arguments) --> exit code

Only that file is imported, so `--help` and mistakes answer at once. Exit codes: 0 done, 1 failed, 2 user error, 75
stopped early with a checkpoint: the same command goes on. 130, 143: ended by Ctrl-C, by SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import hpcllm
from hpcllm.errors import HpcllmError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of the file or device behind standard output
COMMANDS = {
    "prepare": "turn text into a token store",
    "preflight": "is this allocation fit to run? in a minute, on one page",
    "train": "train a model, or go on where the run stopped",
    "plan": "time, memory and cost of layouts on a machine, and the best of them",
    "memory": "what each rank of a run will hold, before the job is queued",
    "layout": "which rank goes where, what crosses nodes, and a better order",
    "generate": "continue a prompt with a trained model",
    "checkpoint": "inspect, verify, diff, convert, compress or decompress checkpoints",
    "report": "one page of pictures and numbers of a run, or of several",
    "schedule": "prove, time and draw a pipeline schedule before the job is queued",
}


class Parser(argparse.ArgumentParser):
    """Parser whose mistakes are one line with exit code 2, as those of the commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hpcllm: error: {message.removeprefix('argument ')}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser(argv).parse_args(argv)
        code: int = arguments.command(arguments)
        if sys.stdout:  # None where it was closed: `inspect >&-`
            sys.stdout.flush()
        return code
    except HpcllmError as error:
        print(f"hpcllm: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `inspect | head`
        _forget_output()
        return 0
    except KeyboardInterrupt:
        print("hpcllm: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename:
            raise
        _forget_output()
        print(f"hpcllm: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _forget_output() -> None:
    """Send the rest of the output nowhere; else the interpreter would fail to write it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _parser(argv: Sequence[str]) -> Parser:
    """Parser of the command line, with the options of the command that argv names."""
    parser = Parser(
        prog="hpcllm",
        description="Training code for large language models that is native to MPI.",
        epilog="In a batch job: srun python -m hpcllm train run.toml. Exit codes: 0 done, 1 failed, 2 user error, "
        "75 stopped early with a checkpoint (by its time limit, a signal, a file STOP): the same command goes on.",
    )
    parser.add_argument("--version", action="version", version=f"hpcllm {hpcllm.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if argv and argv[0] == name:
            module = importlib.import_module(f"hpcllm.cli.{name}")
            command.set_defaults(command=getattr(module, "run", None))
            module.add_arguments(command)
    return parser
