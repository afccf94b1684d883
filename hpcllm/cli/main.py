"""The command line: which command runs, and how it ends.

    hpcllm COMMAND ... --> COMMAND.py of this folder: add_arguments(parser), run(arguments) --> exit code

Only that file is imported, so `--help` and mistakes answer at once; `course` and `perf` are those of
`python -m hpcllm.course` and `python -m hpcllm.perf`. Exit
codes: 0 done, 1 failed, 2 user error, 75 stopped early with a checkpoint: the same command goes on. 130, 143: ended
by Ctrl-C, by SIGTERM.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import hpcllm
from hpcllm.system.command_line import Parser, run_command

COMMANDS = {
    "prepare": "turn text into a token store",
    "store": "look into token stores: info, sample",
    "preflight": "is this allocation fit to run? in a minute, on one page",
    "train": "train a model, or go on where the run stopped",
    "finetune": "fine-tune a model on chats or preferences, or go on where that stopped",
    "plan": "time, memory and cost of layouts on a machine, and the best of them",
    "memory": "what each rank of a run will hold, before the job is queued",
    "layout": "which rank goes where, what crosses nodes, and a better order",
    "generate": "continue a prompt with a trained model",
    "quantise": "write a model with weights of 8 or 4 bits",
    "evaluate": "measure a model: held-out loss, multiple choice, fixed answers, made problems",
    "problems": "write made problems with their answers to train on",
    "judge": "run completions of code against their tests, in a sandbox",
    "checkpoint": "inspect, verify, diff, convert, compress or decompress checkpoints",
    "report": "one page of pictures and numbers of a run, or of several",
    "schedule": "prove, time and draw a pipeline schedule before the job is queued",
    "perf": "measure collectives, codecs, links and training steps of this allocation",
    "course": "labs that grade themselves: replace one function of the trainer",
    "init": "write a run file with every key, its default and its reason",
    "keys": "list the keys of a run file",
    "presets": "list the shapes of models",
    "machines": "list the known machines",
    "codecs": "list the codecs of messages, and the policies that choose among them",
    "completion": "print what makes a shell complete these commands",
}
LISTS = ("init", "keys", "presets", "machines", "codecs")
MOUNTED = {"course": "hpcllm.course.__main__", "perf": "hpcllm.perf.__main__"}
FILES = {**MOUNTED, **dict.fromkeys(LISTS, "hpcllm.cli.lists")}  # the others: COMMAND.py


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return its exit code."""
    return run_command(parser_for, sys.argv[1:] if argv is None else argv)


def parser_for(argv: Sequence[str]) -> Parser:
    """Make the parser of a command line, with the options of the command that its first word names."""
    return make_parser(argv[:1])


def make_parser(loaded: Sequence[str]) -> Parser:
    """Make the parser of all commands, with the options of those that are loaded."""
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
        if name in loaded:
            module = importlib.import_module(FILES.get(name, f"hpcllm.cli.{name}"))
            command.set_defaults(command=getattr(module, "run", None), command_name=name)  # one module, many commands
            module.add_arguments(command)
    return parser
