"""Options that commands share, the types of their values, and which of them go together.

A `type=` function raises argparse.ArgumentTypeError for a value that cannot be meant, with what would be valid; the
parser (system/command_line.py) adds the option's name and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.config.rules import Range
from hpcllm.config.schema import Config, load
from hpcllm.errors import ConfigError


def file_or_folder(text: str) -> Path:
    """Convert an argument that names a file or a folder, there or not; nobody may hinder us to look."""
    if not text:  # an unset shell variable; Path("") would be the whole current folder
        raise argparse.ArgumentTypeError("an empty name; name a file or a folder")
    if fault := fault_of(text):
        raise argparse.ArgumentTypeError(f"cannot look at {shown(text)}: {fault}")
    return Path(text)


def count_to(most: int) -> Callable[[str], int]:
    """Make a `type=` function for whole numbers from 1."""

    def count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no count; valid: 1 to {most}")
        return int(text)

    return count


count = count_to(999_999_999)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Make a `type=` function for whole numbers from least to most."""
    valid = Range(least, most)

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text.strip(), re.ASCII) or int(text) not in valid:
            raise argparse.ArgumentTypeError(f"{shown(text)} is out of range; valid: a whole number, {valid}")
        return int(text)

    return number


def options_given(
    arguments: argparse.Namespace, command: str, form: str, forms: Mapping[str, Sequence[str]]
) -> list[str]:
    """List the options that are given. forms: form of the command -> its options.

    Raises ConfigError for options of other forms.
    """
    every = dict.fromkeys(key for keys in forms.values() for key in keys)
    given = [key for key in every if getattr(arguments, key) not in (None, False, [])]
    if wrong := [key for key in given if key not in forms[form]]:
        raise ConfigError(f"{command} {form} does not take {spelled(wrong)}; it takes {spelled(forms[form])}")
    return given


def spelled(keys: Sequence[str]) -> str:
    """Write options as on the command line, 'NAME, --global-batch'."""
    return ", ".join("NAME" if key == "name" else f"--{key.replace('_', '-')}" for key in keys)


def add_run_file(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add RUN.toml and --set."""
    about = "a run file to check as well" if optional else "the run file"
    parser.add_argument("run", nargs="?" if optional else None, type=Path, metavar="RUN.toml", help=about)
    words = "override a key of the run file, as in --set mesh.dp=4; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=words)


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add --ranks, for commands that look at a job without being one."""
    parser.add_argument("--ranks", type=count, metavar="N", help="of the job (default: dp x pp x tp of the run file)")


def read_run(path: Path, overrides: Sequence[str]) -> Config:
    """Read a run file with its overrides, and the model that it starts from, if it names one. Raises UserError."""
    config = load(path, overrides)
    if config.run.start_from:
        from hpcllm.checkpoint.huggingface.start import take_model  # torch: only where weights are to be looked at

        config = take_model(config)
    return config
