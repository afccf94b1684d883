"""The command `store`: what is in a token store, in one process or many, of which the first speaks.

info     its facts, from the front alone
sample   documents drawn at random, decoded: targets in a colour, or between marks where there is no colour

    <|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n[[4<|im_end|>]]\\n
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpcllm.cli.options import count, file_or_folder, whole
from hpcllm.system.job import run_with_or_without_mpi
from hpcllm.system.output import add_output, has_colour, is_json_alone, say, show
from hpcllm.system.text import harmless

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.data.store import TokenStore
    from hpcllm.data.tokenizer import Encoder

MARKS, COLOUR = ("[[", "]]"), ("\x1b[32m", "\x1b[0m")
MOST_TOKENS = 2000  # of a document that is shown
SPLITS = ("train", "validation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands."""
    parser.description = "Look into token stores."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command, about in COMMANDS.items():
        own = commands.add_parser(command.__name__, help=about, description=f"{about[0].upper()}{about[1:]}.")
        own.add_argument("store", type=file_or_folder, metavar="STORE", help="a file of `hpcllm prepare`")
        if command is sample:
            own.add_argument("--count", type=count, default=3, metavar="N", help="so many documents (default: 3)")
            own.add_argument("--seed", type=whole(0, (1 << 63) - 1), default=0, help="of the draw (default: 0)")
            own.add_argument("--split", choices=SPLITS, default="train", help="default: train")
        add_output(own)
        own.set_defaults(command=command)


def info(arguments: argparse.Namespace) -> int:
    """Show the facts of a store. Raises DataError."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.data.store import SPLITS, read_header
        from hpcllm.mpi.collective_errors import on_root
        from hpcllm.system.text import printable, table

        header = on_root(comm, lambda: read_header(arguments.store))
        targets = header.counted or header.tokens
        rows = [
            [s, *(f"{each[s]:,}" for each in (header.documents, header.tokens, targets, header.bytes))] for s in SPLITS
        ]
        head = ["split", "documents", "tokens", "targets", "bytes of text"]
        facts = {
            "kind": header.kind,
            "vocabulary": header.vocabulary,
            "fingerprint": header.fingerprint,
            "documents": header.documents,
            "tokens": header.tokens,
            "targets": targets,
            "bytes": header.bytes,
            "sources": [run._asdict() for run in header.sources],
            "template": header.template,
        }
        words = [f"{key:<12} {facts[key]}" for key in ("kind", "vocabulary", "fingerprint")]
        runs = [[printable(run.name), f"{run.train:,}", f"{run.validation:,}"] for run in header.sources]
        sources = ["", *table(["source", "train", "validation"], runs, indent="", gap="  ")] if runs else []
        template = ["", "template", *header.template.split("\n")] if header.template else []
        if comm is None or comm.rank == 0:
            show(arguments, facts, [*words, "", *table(head, rows, indent="", gap="  "), *sources, *template])
        return 0

    return run_with_or_without_mpi(job)


def sample(arguments: argparse.Namespace) -> int:
    """Show documents of a store, decoded. Raises DataError."""

    def job(comm: MPI.Intracomm | None) -> int:
        from hpcllm.data.store import TokenStore
        from hpcllm.data.tokenizer import Encoder

        store = TokenStore.open(arguments.store, comm)
        documents = len(store.tokens(arguments.split)) and store.header.documents[arguments.split]
        drawn = sorted(random.Random(arguments.seed).sample(range(documents), min(arguments.count, documents)))
        if comm is not None and comm.rank:
            return 0
        encoder = Encoder(store.tokenizer_json)
        found = [_decoded(store, encoder, arguments.split, number) for number in drawn]
        if not is_json_alone(arguments):
            for document in found:
                _print(document, store.header.kind, arguments.wide)
        show(arguments, found, []) if arguments.json else None
        return 0

    return run_with_or_without_mpi(job)


def _decoded(store: TokenStore, encoder: Encoder, split: Any, number: int) -> dict[str, Any]:
    """Decode a document as runs of tokens that are targets, or are not. No more than MOST_TOKENS of it."""
    first, end = map(int, store.documents(split)[number : number + 2])
    shown = min(end, first + MOST_TOKENS)
    ids, counted = store.tokens(split)[first:shown], store.counted_of(split, first, shown)
    flags = [True] * len(ids) if counted is None else counted.tolist()
    runs = [(flag, [place for place, _ in run]) for flag, run in groupby(enumerate(flags), key=lambda each: each[1])]
    parts = [{"target": flag, "text": encoder.spelled(ids[run[0] : run[-1] + 1])} for flag, run in runs]
    return {"document": number, "tokens": end - first, "targets": sum(flags), "left_out": end - shown, "parts": parts}


def _print(document: dict[str, Any], kind: str, wide: bool) -> None:
    number, tokens, left_out = (document[key] for key in ("document", "tokens", "left_out"))
    role = f", {('chosen', 'rejected')[number % 2]} of pair {number // 2:,}" if kind == "preferences" else ""
    of = f"{tokens:,} tokens, {document['targets']:,} targets" + (f"; {left_out:,} not shown" if left_out else "")
    begin, end = COLOUR if has_colour(sys.stdout) else MARKS
    all_count = kind == "text"
    say([f"document {number:,}{role}: {of}"], wide)
    for part in document["parts"]:
        text = harmless(part["text"])
        print(f"{begin}{text}{end}" if part["target"] and not all_count else text, end="")
    print("" if document["parts"][-1]["text"].endswith("\n") else "\n")


COMMANDS = {
    info: "show kind, size and template of a store",
    sample: "show documents as text, what is learned from them in a colour or between [[ and ]]",
}
