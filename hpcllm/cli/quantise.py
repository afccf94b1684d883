"""The command `quantise`: weights of 8 or 4 bits, and what that costs in bits per byte of a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcllm.cli.options import file_or_folder, whole
from hpcllm.errors import ConfigError
from hpcllm.system.job import run_with_or_without_mpi
from hpcllm.system.output import add_output, check_writable, show
from hpcllm.system.text import printable_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Write a model with the weights of its linear layers in 8 bits, a scale for each output, or in 4 bits, a scale "
        "for 64 inputs, rounded to nearest; embeddings, norms and the output layer stay as they are. The folder is "
        "safetensors and config.json, which generate, evaluate, convert and run.start_from read. In one process."
    )
    add, words = parser.add_argument, "a checkpoint, a run folder, or a Hugging Face folder"
    add("checkpoint", type=file_or_folder, metavar="CHECKPOINT", help=words)
    add("target", type=file_or_folder, metavar="OUT", help="the folder to write; must be new")
    add("--bits", type=int, choices=(8, 4), default=8, help="of a weight (default: 8)")
    words = "a token store: measure bits per byte of its held-out text before and after"
    add("--store", type=file_or_folder, metavar="FILE", help=words)
    words = "rows of the store to measure with (default: all held-out ones)"
    add("--limit", type=whole(1, 1 << 40), metavar="N", help=words)
    add_output(parser, "the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print the report. Raises UserError, CheckpointError, HuggingFaceError."""

    def job(comm: Any) -> int:
        from hpcllm.mpi.collective_errors import on_root

        return on_root(comm, lambda: _quantise(arguments))

    return run_with_or_without_mpi(job)


def _quantise(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from hpcllm.checkpoint.huggingface.quantise import quantise

    if arguments.limit and not arguments.store:
        raise ConfigError("--limit is of --store, which is not given")
    check_writable(arguments.target / "x" if arguments.target.is_dir() else arguments.target)
    measured = _measure(arguments) if arguments.store else None
    before = measured(arguments.checkpoint) if measured else None
    with tqdm(unit="B", unit_scale=True, leave=False, disable=None, file=sys.stderr) as bar:
        report = quantise(arguments.checkpoint, arguments.target, arguments.bits, bar.update)
    facts = report.as_dict()
    scales = f"a scale for {report.group} inputs" if report.group else "a scale for each output"
    source, target = (printable_path(str(path)) for path in (report.source, report.target))
    lines = [
        f"{source} -> {target}: {report.architecture}, {report.parameters / 1e6:.2f} M parameters, "
        f"in {report.seconds:.1f} s",
        f"linear layers in {report.bits} bits, {scales}: {report.bytes / 1e6:.1f} MB of weights, "
        f"of {report.stored_bytes / 1e6:.1f} MB ({report.bytes / report.stored_bytes:.0%})",
    ]
    if measured and before is not None:
        after = measured(arguments.target)
        facts |= {"bits_per_byte_before": before, "bits_per_byte": after}
        lines.append(f"bits per byte: {before:.4f} -> {after:.4f} ({after - before:+.4f})")
    show(arguments, facts, lines)
    return 0


def _measure(arguments: argparse.Namespace) -> Callable[[Path], float]:
    """Return a function that measures a model on the held-out part of the store. Raises UserError, CheckpointError."""
    from hpcllm.cli.evaluate import Bars
    from hpcllm.evaluation.evaluate import measure_alike
    from hpcllm.evaluation.settings import Options
    from hpcllm.evaluation.tasks import TaskName

    task = TaskName(str(arguments.store), "store", arguments.store)
    measure = measure_alike(arguments.checkpoint, task, Options(limit=arguments.limit), Bars(prints=True))
    return lambda path: measure(path).figures["bits_per_byte"].value
