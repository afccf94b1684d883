"""Report of `prepare`: progress and problems by reason while it works, a table and a dict at the end."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI
from tqdm import tqdm

from hpcllm.data.documents import Document, Problem
from hpcllm.data.store import Split
from hpcllm.data.tokenizer import LONGEST_WORD
from hpcllm.system.text import printable_path

EXAMPLES = 3
LINE_EVERY_S = 10.0  # without a terminal
LARGE_SAMPLE_CHARACTERS = 2**23  # to train on more takes longer than a few seconds
LONG_WORDS = f"cuts in words of more than {LONGEST_WORD} characters, to train the tokenizer; all text is kept"


@dataclass(frozen=True)
class Dropped:
    """Number of documents dropped for one reason, and where the first of them are."""

    count: int
    examples: tuple[str, ...]

    def __add__(self, later: Dropped) -> Dropped:
        return Dropped(self.count + later.count, (self.examples + later.examples)[:EXAMPLES])


class Problems(dict[str, Dropped]):
    """Dropped documents by reason, in the order in which the reasons came up."""

    def add(self, reason: str, *origins: str, count: int = 1) -> None:
        self[reason] = self.get(reason, Dropped(0, ())) + Dropped(count, origins)


def gather_problems(problems: Sequence[Problems], comm: MPI.Intracomm) -> Problems:
    """Gather all ranks' problems on rank 0, examples in document order; nothing elsewhere. Collective over comm."""
    whole = Problems()
    for kind in problems:
        for part in comm.gather(dict(kind)) or ():
            for reason, dropped in part.items():
                whole.add(reason, *dropped.examples, count=dropped.count)
    return whole


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """Result of `prepare`, equal on every rank. Counts are over all ranks; bytes are of normalised UTF-8."""

    path: Path
    ranks: int
    seconds: float
    vocabulary: int
    tokenizer_trained: bool
    long_words_cut: int  # cuts in words of more than LONGEST_WORD characters, before a tokenizer was trained
    documents: Mapping[Split, int]
    tokens: Mapping[Split, int]
    bytes: Mapping[Split, int]
    skipped: Mapping[str, int]  # entries of folders that are not read, by reason
    dropped: Mapping[str, Dropped]  # documents, by reason
    kind: str  # of the store
    counted: Mapping[Split, int]  # tokens that are targets
    zstd19_bits_per_byte: float  # of the validation text, NaN if there is none
    fingerprint: str

    @property
    def bytes_per_token(self) -> float:
        """Mean over both splits, ends of text not counted; NaN without tokens."""
        ends = sum(self.documents.values()) if self.kind == "text" else 0
        tokens = sum(self.tokens.values()) - ends
        return sum(self.bytes.values()) / tokens if tokens else math.nan

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"the {split} split is empty, all of the {sum(self.documents.values())} documents fell into the other: add "
            "text, cut long files into documents or change the validation fraction"
            for split, count in self.documents.items()
            if not count
        )

    def lines(self) -> list[str]:
        """Return the lines of the table that the command prints."""
        head = f"{'':<12}{'documents':>12}{'MB of text':>14}{'tokens':>16}"
        rows = [
            f"{split:<12}{count:>12,}{self.bytes[split] / 1e6:>14,.2f}{self.tokens[split]:>16,}"
            for split, count in self.documents.items()
        ]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        origin = "trained on this text" if self.tokenizer_trained else "as given"
        facts = [
            f"tokenizer   {self.vocabulary:,} tokens, {origin}; {_number(self.bytes_per_token)} bytes a token",
            f"zstd -19    {_number(self.zstd19_bits_per_byte)} bits per byte of the validation text",
            *([f"{self.kind:<11} {self._targets()}"] if self.kind != "text" else []),
            *([f"note        {self.long_words_cut:,} {LONG_WORDS}"] if self.long_words_cut else []),
            *(f"skipped     {count:,} x {reason}" for reason, count in self.skipped.items()),
            *(_drop_line(reason, dropped) for reason, dropped in self.dropped.items()),
            *(f"warning     {warning}" for warning in self.warnings),
            f"written     {printable_path(str(self.path))} in {self.seconds:.1f} s by {ranks}",
        ]
        return [head, *rows, *facts]

    def _targets(self) -> str:
        counts = ", ".join(f"{self.counted[s]:,} of {self.tokens[s]:,} {s} tokens" for s in self.tokens)
        pairs = "two documents a pair; " if self.kind == "preferences" else ""
        return f"{pairs}targets are {counts}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, None where there is no number."""
        values = {**dataclasses.asdict(self), "path": str(self.path)}
        values |= {"bytes_per_token": self.bytes_per_token, "warnings": list(self.warnings)}
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def show_progress(
    items: Iterator[Document | Problem], label: str, total_bytes: int, comm: MPI.Intracomm
) -> Iterator[Document | Problem]:
    """Pass the items on and show rank 0's share of the work on stderr: a bar, or in a log a line now and then.

    total_bytes: of this rank's text, 0 if not known yet.
    """
    if comm.rank:
        yield from items
        return
    on_terminal = sys.stderr.isatty()
    last_line_s, done_bytes = time.monotonic(), 0
    with tqdm(total=total_bytes or None, desc=label, unit="B", unit_scale=True, disable=not on_terminal) as bar:
        for item in items:
            yield item
            size_bytes = item.size_bytes if isinstance(item, Document) else 0
            done_bytes += size_bytes
            bar.update(size_bytes)
            if not on_terminal and time.monotonic() - last_line_s > LINE_EVERY_S:
                last_line_s = time.monotonic()
                total = f" of {total_bytes / 1e6:,.0f}" if total_bytes else ""
                print(f"{label}: rank 0 at {done_bytes / 1e6:,.0f}{total} MB", file=sys.stderr, flush=True)


def say_training(sample: Sequence[str], vocabulary: int) -> None:
    """Announce on stderr what may take long without a sign. sample: empty but on rank 0."""
    if (characters := sum(map(len, sample))) > LARGE_SAMPLE_CHARACTERS:
        words = f"training a tokenizer of {vocabulary:,} tokens on {characters / 1e6:,.0f} million characters"
        print(words, file=sys.stderr, flush=True)


def _number(value: float) -> str:
    return "no" if math.isnan(value) else f"{value:.3f}"


def _drop_line(reason: str, dropped: Dropped) -> str:
    more = ", ..." if dropped.count > len(dropped.examples) else ""
    return f"dropped     {dropped.count:,} x {reason}: {', '.join(dropped.examples)}{more}"
