"""The command `preflight`: facts of all ranks, checks, measurements, one page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hpcllm.cli.options import add_run_file
from hpcllm.errors import ConfigError
from hpcllm.system.command_line import add_stall_limit
from hpcllm.system.output import COLUMNS, add_output, show

if TYPE_CHECKING:
    from mpi4py import MPI

STALL_S = 60.0  # a page takes about a minute in all
WIDE_COLUMNS = 110  # paragraphs of --wide: longer lines are hard to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Check the allocation that it is started in, as in srun python -m hpcllm preflight run.toml: MPI, cores, "
        "devices, network, memory, files, versions; then measure matrix products, messages, files and codecs. Exit "
        "code 1 if a run would break or take far longer than it should."
    )
    add_run_file(parser, optional=True)
    parser.add_argument("--quick", action="store_true", help="no measurements: a second instead of half a minute")
    add_stall_limit(parser, STALL_S)
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the page; exit code 1 if a run would break or take far longer. Raises UserError, StallError."""
    from hpcllm.system.job import run_job

    return run_job(lambda world: examine_and_print(arguments, world), arguments.stall_s)


def examine_and_print(arguments: argparse.Namespace, world: MPI.Intracomm) -> int:
    """Examine the allocation and print the page on rank 0. Collective over world. Raises UserError, StallError."""
    from hpcllm.config import schema
    from hpcllm.mpi.collective_errors import on_root
    from hpcllm.system.quick_imports import quick_imports

    tables = on_root(world, lambda: _tables(arguments))
    with quick_imports():
        from hpcllm.preflight.examination import examine_allocation

    page = examine_allocation(world, schema.from_tables(tables) if tables else None, arguments.quick)

    def print_page() -> bool:
        if not page:
            return True
        show(arguments, page.as_dict(), page.lines(WIDE_COLUMNS if arguments.wide else COLUMNS))
        return page.is_fit

    return 0 if on_root(world, print_page) else 1


def _tables(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Tables of the run file, if there is one. Raises ConfigError."""
    from hpcllm.config import schema

    if arguments.run:
        return schema.to_tables(schema.load(arguments.run, arguments.overrides))
    if arguments.overrides:
        raise ConfigError("--set without a run file; valid: preflight RUN.toml --set table.key=value")
    return {}
