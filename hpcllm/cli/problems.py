"""The command `problems`: text to train on, of the problems that `evaluate` never measures with."""

from __future__ import annotations

import argparse
import sys

from hpcllm.cli.options import count_to, file_or_folder, whole
from hpcllm.config.names import nearest, shown
from hpcllm.errors import ConfigError
from hpcllm.evaluation.problems import FAMILIES, PARTS, lines_of, problems
from hpcllm.system.output import STANDARD_OUTPUT, check_writable, write_whole
from hpcllm.system.text import printable_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write problems with their answers, a line each, to train on; `evaluate` measures with others of the same "
        "family, whatever the seeds: which are held out is decided by a hash of the problem."
    )
    add = parser.add_argument
    words = f"{', '.join(FAMILIES)}; with a size as for evaluate, sort:8"
    add("family", type=family_and_size, metavar="FAMILY[:N]", help=words)
    add("--size", type=whole(1, 10**6), metavar="N", help="letters, digits or facts of each (default: as evaluate)")
    add(
        "--count", type=count_to(10_000_000), default=10_000, metavar="N", help="so many, no two alike (default: 10000)"
    )
    add("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of the draws (default: 0)")
    add("--part", choices=PARTS, default="train", help="which problems (default: train)")
    words = "the text to write (default: standard output)"
    add("--output", type=file_or_folder, default=STANDARD_OUTPUT, metavar="FILE", help=words)


def family_and_size(text: str) -> tuple[str, int | None]:
    """Read a family of problems, with a size behind a colon or without."""
    name, colon, size = text.partition(":")
    if name not in FAMILIES:
        raise argparse.ArgumentTypeError(f"{shown(text)} is unknown; {nearest(name, FAMILIES)}")
    return name, whole(1, 10**6)(size) if colon else None


def run(arguments: argparse.Namespace) -> int:
    """Write the problems. Raises ConfigError for a size that there is not, or more problems than there are."""
    check_writable(arguments.output)
    family, named = arguments.family
    if named and arguments.size and named != arguments.size:
        raise ConfigError(f"{family}:{named} with --size {arguments.size}; valid: one of both")
    size = named or arguments.size or FAMILIES[family].sizes[1]
    text = "".join(lines_of(problems(family, size, arguments.count, arguments.seed, arguments.part)))
    if arguments.output == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_whole(arguments.output, text)
        print(f"{printable_path(str(arguments.output))}: {arguments.count:,} problems of {family}:{size}")
    return 0
