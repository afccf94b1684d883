"""Text -> token store, by any number of ranks, the same bits from each.

    all ranks   read --> normalise --> digest, split key, size             pass 1, census.py
    exchange    exact duplicates go, the first in global order stays       exchange.py
    rank 0      trains a tokenizer on a sample, or loads one; broadcast    sample.py, tokenizer.py
    all ranks   read again --> tokenize --> spool on disk                  pass 2, spool.py
    all ranks   write their slabs of one HDF5 file; rank 0 renames it      writer.py

Memory is bounded by the largest document and some 40 bytes a document, not by the corpus; the folder of the output
holds the tokens twice for a while. Every phase ends with all ranks agreeing that it worked: the first failure ends
all, and the folder in which everything was put aside goes. What a killed run leaves is removed by the next one.
"""

from __future__ import annotations

import glob
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import zstandard
from mpi4py import MPI

from hpcllm.data import tokenizer, writer
from hpcllm.data.census import Census, Placement, place, take_census
from hpcllm.data.documents import Document, Problem, read_documents
from hpcllm.data.exchange import before_and_total, gather_array, on_all
from hpcllm.data.inputs import Unit, find_units, share
from hpcllm.data.report import PrepareReport, Problems, gather_problems, show_progress
from hpcllm.data.spool import Spooled, spool_tokens
from hpcllm.data.store import SPLITS, is_store, store_fingerprint
from hpcllm.errors import CollectiveError, DataError
from hpcllm.printable import printable_path
from hpcllm.together import on_root

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """inputs: files and folders; none: the source of the Python standard library. field: what holds the text in a line
    of .jsonl. vocabulary: of a tokenizer to be trained; one that is given keeps its own. Raises DataError."""

    inputs: tuple[Path, ...] = ()
    output: Path
    field: str = "text"
    vocabulary: int = 4096
    tokenizer: Path | None = None
    validation_fraction: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        smallest, largest = tokenizer.SMALLEST_VOCABULARY, tokenizer.LARGEST_VOCABULARY
        if not 0 <= self.validation_fraction < 1:
            raise DataError(f"validation_fraction = {self.validation_fraction}; valid: 0 <= fraction < 1")
        if not smallest <= self.vocabulary <= largest:
            raise DataError(
                f"vocabulary = {self.vocabulary}; valid: {smallest} (every byte and the end of text) to {largest}"
            )
        if not 0 <= self.seed < 2**63:
            raise DataError(f"seed = {self.seed}; valid: 0 <= seed < 2^63")


def prepare(options: PrepareOptions, comm: MPI.Intracomm) -> PrepareReport:
    """Write the token store `options.output`, over an older one. Returns the same report on every rank.

    Collective over comm. Raises DataError before any work for inputs, an output or a tokenizer that cannot be, and
    later if an input changes under our hands; CollectiveError if a rank fails. An older store then stays as it was.
    """
    start_s = MPI.Wtime()
    given = on_root(comm, lambda: _check(options))
    tokenizer.limit_threads(_ranks_on_node(comm))
    units, skipped = _my_units(options, comm)
    with ExitStack() as cleanup:
        folder = on_root(comm, lambda: _put_aside(options.output))
        if comm.rank == 0:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        job = _Job(options, comm, units, folder)
        census, placement = _first_pass(job)
        tokenizer_json = given or _train(job, census, placement)
        encoder = on_all(comm, lambda: tokenizer.Encoder(tokenizer_json))
        spooled = _second_pass(job, census, placement, encoder)
        contents = _write_store(job, spooled, placement, encoder)
    return _report(job, contents, [census.problems, spooled.duplicates], skipped, given is None, MPI.Wtime() - start_s)


@dataclass(frozen=True)
class _Job:
    """What every phase needs: the order, the ranks, this rank's inputs, the place for what is unfinished."""

    options: PrepareOptions
    comm: MPI.Intracomm
    units: Sequence[Unit]
    folder: Path

    def read(self) -> Iterator[Document | Problem]:
        return (item for unit in self.units for item in read_documents(unit, self.options.field))

    def writes(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function; what the disk refuses it is said with the name of the folder."""

        def named() -> T:
            try:
                return function()
            except OSError as error:
                where = printable_path(str(self.options.output.absolute().parent))
                raise CollectiveError(f"cannot write in {where}: {error.strerror or error}") from error

        return named


def _check(options: PrepareOptions) -> str | None:
    """Whether the work can end well, before it starts. Returns the JSON of a tokenizer that was given."""
    output = options.output
    if not output.parent.is_dir():
        raise DataError(f"the output {str(output)!r} lies in a folder that does not exist; make {str(output.parent)!r}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise DataError(f"the output {str(output)!r} lies in a folder where you may not write")
    if output.exists() and not (output.is_file() and is_store(output)):
        raise DataError(
            f"the output {str(output)!r} exists and is not a token store; it is left as it is, name another"
        )
    tokenizer.library()
    return tokenizer.load(options.tokenizer) if options.tokenizer else None


def _my_units(options: PrepareOptions, comm: MPI.Intracomm) -> tuple[list[Unit], dict[str, int]]:
    """Rank 0 walks the folders; each rank hears of its own units only. Collective over comm."""
    shares: list[list[Unit]] = []
    skipped: Counter[str] = Counter()

    def find() -> None:
        shares.extend(share(find_units(options.inputs, skipped), comm.size))

    on_root(comm, find)
    return comm.scatter(shares or None), dict(skipped)


def _put_aside(output: Path) -> Path:
    """A new folder beside the output. Older ones are of killed runs; should one be alive, it fails and we go on."""
    for left in glob.glob(f".{glob.escape(output.name)}.*.partial", root_dir=output.parent):
        shutil.rmtree(output.parent / left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))


def _first_pass(job: _Job) -> tuple[Census, Placement]:
    options, comm = job.options, job.comm
    items = show_progress(job.read(), "reading", 0, comm)
    census = on_all(comm, lambda: take_census(items, options.seed, options.validation_fraction))
    placement = place(census, options.validation_fraction, comm)
    if not any(amount.documents for amount in placement.total.values()):
        problems = gather_problems([census.problems], comm)
        on_root(comm, lambda: _refuse_nothing(problems))
    return census, placement


def _refuse_nothing(problems: Problems) -> None:
    reasons = ", ".join(f"{dropped.count} x {reason}" for reason, dropped in problems.by_reason.items())
    raise DataError(f"no document is left of what was read: {reasons or 'the files hold no lines'}")


def _train(job: _Job, census: Census, placement: Placement) -> str:
    texts = census.sample.gather(placement.stays, job.comm)
    return _by_root(job.comm, lambda: tokenizer.train(texts, job.options.vocabulary))


def _second_pass(job: _Job, census: Census, placement: Placement, encoder: tokenizer.Encoder) -> Spooled:
    items = show_progress(job.read(), "tokenizing", sum(census.sizes), job.comm)
    documents = (item for item in items if isinstance(item, Document))
    rank = job.comm.rank
    return on_all(job.comm, job.writes(lambda: spool_tokens(documents, census, placement, encoder, job.folder, rank)))


def _write_store(job: _Job, spooled: Spooled, placement: Placement, encoder: tokenizer.Encoder) -> writer.Contents:
    before, total = before_and_total([spooled.spools[split].tokens for split in SPLITS], job.comm)
    contents = writer.Contents(
        tokenizer_json=encoder.tokenizer_json,
        token_bytes=encoder.token_bytes,
        end_of_text=encoder.end_of_text,
        seed=job.options.seed,
        validation_fraction=job.options.validation_fraction,
        zstd19_bits_per_byte=_zstd19_bits_per_byte(spooled, job.comm),
        fingerprint=store_fingerprint(encoder.tokenizer_json, job.comm.allreduce(spooled.fingerprint)),
        documents={split: placement.total[split].documents for split in SPLITS},
        tokens=dict(zip(SPLITS, total, strict=True)),
        bytes={split: placement.total[split].bytes for split in SPLITS},
    )
    path = job.folder / "store.h5"
    offsets = _by_root(job.comm, job.writes(lambda: writer.create(path, contents)))
    for split, tokens_before in zip(SPLITS, before, strict=True):
        slabs = writer.Slabs(split, tokens_before, placement.before[split].documents, spooled.spools[split])
        on_all(job.comm, job.writes(partial(slabs.write, path, offsets)))
    _by_root(job.comm, job.writes(lambda: writer.finish(path, job.options.output)))
    return contents


def _zstd19_bits_per_byte(spooled: Spooled, comm: MPI.Intracomm) -> float:
    """One stream on one rank, the beginning of the validation text: the yardstick that a reader can check by hand."""
    text = gather_array(np.frombuffer(spooled.validation_text, np.uint8), comm)
    figure = 8 * len(zstandard.compress(text.tobytes(), 19)) / len(text) if len(text) else math.nan
    return float(comm.bcast(figure))


def _report(
    job: _Job,
    contents: writer.Contents,
    problems: Sequence[Problems],
    skipped: dict[str, int],
    trained: bool,
    seconds: float,
) -> PrepareReport:
    report = PrepareReport(
        path=job.options.output,
        ranks=job.comm.size,
        seconds=seconds,
        vocabulary=contents.vocabulary,
        tokenizer_trained=trained,
        documents=contents.documents,
        tokens=contents.tokens,
        bytes=contents.bytes,
        skipped=skipped,
        dropped=gather_problems(problems, job.comm).by_reason,
        zstd19_bits_per_byte=contents.zstd19_bits_per_byte,
        fingerprint=contents.fingerprint,
    )
    return cast(PrepareReport, job.comm.bcast(report))


def _by_root(comm: MPI.Intracomm, function: Callable[[], T]) -> T:
    """Rank 0 does it and all get the result; whatever it raises, libraries' errors too, ends all. Collective."""
    return cast(T, comm.bcast(on_all(comm, lambda: function() if comm.rank == 0 else None)))


def _ranks_on_node(comm: MPI.Intracomm) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = node.size
    node.Free()
    return ranks
