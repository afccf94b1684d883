"""The command `prepare`: text or chats -> one HDF5 token store, on any number of ranks."""

from __future__ import annotations

import argparse

from hpcllm.cli.options import file_or_folder, whole
from hpcllm.config.rules import Range
from hpcllm.errors import ConfigError
from hpcllm.system.command_line import add_stall_limit, real
from hpcllm.system.output import add_output, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Clean text, drop duplicates, train or load a tokenizer, write one HDF5 token store. "
        "Ranks share the work under mpirun or srun; any number of them writes the same file."
    )
    add = parser.add_argument
    words = (
        "files or folders: text, .jsonl .json .csv .tsv .parquet, also with .gz .zst .bz2 .xz; "
        "none: the source of the Python standard library"
    )
    add("inputs", nargs="*", type=file_or_folder, metavar="INPUT", help=words)
    add("--output", type=file_or_folder, required=True, metavar="FILE", help="the token store to write")
    add("--field", help="key or column that holds the text of a row (default: text)")
    words = (
        "rows are chats: messages, prompt and completion, or (prompt,) chosen and rejected; answers alone are targets"
    )
    add("--chat", action="store_true", help=words)
    words = "how messages become text: chatml (default), llama3, mistral, plain, or the tokenizer's own, in a sandbox"
    add("--template", choices=("chatml", "llama3", "mistral", "plain", "tokenizer"), help=words)
    add("--vocabulary", type=whole(1, 1 << 24), default=4096, help="size of a new tokenizer (default: 4096)")
    words = "a byte-level tokenizer.json or its folder, or a store, checkpoint or run with one, instead"
    add("--tokenizer", type=file_or_folder, metavar="FILE", help=words)
    words = "share of the documents to hold out (default: 0.02)"
    add("--validation-fraction", type=real(Range(0, 1)), default=0.02, help=words)
    add("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of the train/validation split (default: 0)")
    add_stall_limit(parser)
    add_output(parser, "the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a token store, on all ranks of the job. Raises UserError."""
    from hpcllm.system.job import run_job

    if arguments.template and not arguments.chat:
        raise ConfigError(f"--template {arguments.template} is of chats: give --chat as well")
    if arguments.field and arguments.chat:
        raise ConfigError("--field is of texts; chats have the fields messages, prompt, completion, chosen, rejected")
    keys = ("output", "vocabulary", "tokenizer", "validation_fraction", "seed")

    def job(world) -> int:  # type: ignore[no-untyped-def]
        from hpcllm.data.prepare import PrepareOptions  # imports MPI, whose start run_job limits
        from hpcllm.data.prepare import prepare as prepare_store

        template = (arguments.template or "chatml") if arguments.chat else ""
        given = {key: getattr(arguments, key) for key in keys}
        field = arguments.field or "text"
        options = PrepareOptions(inputs=tuple(arguments.inputs), field=field, template=template, **given)
        report = prepare_store(options, world)
        if world.rank == 0:
            show(arguments, report.as_dict(), report.lines())
        return 0

    return run_job(job, arguments.stall_s)
