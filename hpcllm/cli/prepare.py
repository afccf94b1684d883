"""The command `prepare`: text -> one HDF5 token store, on any number of ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hpcllm.cli.options import add_json, file_or_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Clean text, drop duplicates, train or load a tokenizer, write one HDF5 token store. "
        "Ranks share the work under mpirun or srun; any number of them writes the same file."
    )
    add = parser.add_argument
    words = "files or folders: text, .jsonl, also .gz and .zst; none: the source of the Python standard library"
    add("inputs", nargs="*", type=file_or_folder, metavar="INPUT", help=words)
    add("--output", type=Path, required=True, metavar="FILE", help="the token store to write")
    add("--field", default="text", help="what holds the text in a line of .jsonl (default: text)")
    add("--vocabulary", type=int, default=4096, help="size of a new tokenizer (default: 4096)")
    add("--tokenizer", type=Path, metavar="FILE", help="a byte-level tokenizer.json to use instead")
    words = "share of the documents to hold out (default: 0.02)"
    add("--validation-fraction", type=float, default=0.02, help=words)
    add("--seed", type=int, default=0, help="of the train/validation split (default: 0)")
    add_json(parser, "print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a token store, on all ranks of the job. Raises UserError."""
    from hpcllm.data.prepare import PrepareOptions
    from hpcllm.data.prepare import prepare as prepare_store
    from hpcllm.system.job import run_job

    keys = ("output", "field", "vocabulary", "tokenizer", "validation_fraction", "seed")
    options = PrepareOptions(inputs=tuple(arguments.inputs), **{key: getattr(arguments, key) for key in keys})

    def job(world) -> int:  # type: ignore[no-untyped-def]
        report = prepare_store(options, world)
        if world.rank == 0:
            print(json.dumps(report.as_dict()) if arguments.json else "\n".join(report.lines()))
        return 0

    return run_job(job)
