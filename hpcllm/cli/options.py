"""Options that commands share, and the types of their values.

A `type=` function raises argparse.ArgumentTypeError for a value that cannot be meant, with what would be valid; then
argparse adds the option's name and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hpcllm.config.schema import Config, load
from hpcllm.errors import ConfigError


def file_or_folder(text: str) -> Path:
    """Convert an argument that names a file or a folder."""
    if not text:  # an unset shell variable; Path("") would be the whole current folder
        raise argparse.ArgumentTypeError("an empty name; name a file or a folder")
    return Path(text)


def parse_count(option: str, text: str) -> int:
    """Parse a whole number of at least 1. Raises ConfigError."""
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < 1:
        raise ConfigError(f"--{option} {text!r} is no count; valid: 1 to 999999999")
    return int(text)


def add_run_file(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add RUN.toml and --set."""
    if optional:
        parser.add_argument("run", nargs="?", type=Path, metavar="RUN.toml", help="a run file to check as well")
    else:
        parser.add_argument("run", type=Path, metavar="RUN.toml", help="the run file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key of the run file, as in --set mesh.dp=4; may be repeated",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add --ranks, for commands that look at a job without being one."""
    parser.add_argument("--ranks", type=int, metavar="N", help="of the job (default: dp x pp x tp of the run file)")


def add_json(parser: argparse._ActionsContainer, about: str = "print as JSON") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=about)


def read_run(path: Path, overrides: Sequence[str]) -> Config:
    """Read a run file with its overrides, and the model that it starts from, if it names one. Raises UserError."""
    config = load(path, overrides)
    if config.run.start_from:
        from hpcllm.checkpoint.huggingface.start import take_model  # torch: only where weights are to be looked at

        config = take_model(config)
    return config
