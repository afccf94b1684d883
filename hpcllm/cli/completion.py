"""The command `completion`: a script that makes bash, zsh or tcsh complete commands, options and files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpcllm.cli.options import file_or_folder
from hpcllm.config import machines, schema
from hpcllm.errors import ConfigError
from hpcllm.pipeline.schedules import SCHEDULES

SHELLS = ("bash", "zsh", "tcsh")
FILES = (Path, file_or_folder)  # types of arguments that are files
CHOICES: dict[str, Callable[[], Sequence[str]]] = {  # destination of an argument -> the names that it takes
    "machine": machines.names,
    "model": schema.preset_names,
    "name": lambda: list(SCHEDULES),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Print a script that makes a shell complete hpcllm's commands, options, choices and files. "
        "bash: hpcllm completion bash > ~/.local/share/bash-completion/completions/hpcllm; "
        "zsh: hpcllm completion zsh > FOLDER/_hpcllm, FOLDER being one of $fpath; "
        "tcsh (commands and options): hpcllm completion tcsh > ~/.hpcllm.tcsh, and source it in ~/.tcshrc"
    )
    parser.add_argument("shell", choices=SHELLS, type=str.lower, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Raises ConfigError without the package that makes it."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion is made by the package shtab: pip install shtab") from error
    from hpcllm.cli.main import COMMANDS, make_parser

    parser = make_parser(list(COMMANDS))
    for action in _actions(parser):
        _complete(action, shtab.FILE)
    script: str = shtab.complete(parser, arguments.shell)
    print(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def _complete(action: argparse.Action, files: object) -> None:
    """Offer names where the parser, for better messages than argparse's, has a function of its own; or files."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.dest in CHOICES:
        action.choices = CHOICES[action.dest]()
    elif re.fullmatch(r"[\w-]+(\|[\w-]+)+", metavar):
        action.choices = metavar.split("|")
    elif action.type in FILES or metavar.endswith(("FILE", ".toml", ".json")):
        action.complete = files  # type: ignore[attr-defined] # shtab's
