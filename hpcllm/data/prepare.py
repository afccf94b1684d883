"""Text -> token store, by any number of ranks, the same bits from each.

    all ranks   read --> normalise, or render chats --> digest, split key, size     pass 1, dedup.py
    exchange    exact duplicates go, the first in global order stays        dedup.py
    rank 0      trains a tokenizer on a sample, or loads one; broadcast     tokenizer.py
    all ranks   read again --> tokenize --> spill to disk                   pass 2, store_writer.py
    all ranks   write their slabs of one HDF5 file; rank 0 renames it       store_writer.py

Memory is bounded by the largest document and some 40 bytes a document, not by the corpus; the folder of the output
holds the tokens twice for a while. Every phase ends with all ranks agreeing that it worked: the first failure ends
all, and the folder of unfinished files is removed. A killed run leaves that folder; the next run removes it.
"""

from __future__ import annotations

import glob
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import zstandard
from mpi4py import MPI

from hpcllm.checkpoint.layout import END_OF_TEXT
from hpcllm.data import store_writer, tokenizer
from hpcllm.data.chat import ChatRows, open_template
from hpcllm.data.chat_template import (
    NAMES,
    NO_TEMPLATE,
    OWN,
    PLAIN,
    TEMPLATES,
    TemplateSource,
    own_template,
)
from hpcllm.data.dedup import Assignment, DocumentIndex, assign_splits, before_and_total, gather_array, index_documents
from hpcllm.data.documents import Document, Problem, RowReader, TextRows, read_documents
from hpcllm.data.inputs import Unit, find_units, share
from hpcllm.data.prepare_report import PrepareReport, gather_problems, say_training, show_progress
from hpcllm.data.sources import MOST_RUNS, Run, joined, name_inputs, tally
from hpcllm.data.store import KINDS, LARGEST_VOCABULARY, SPLITS, Header, is_store, store_fingerprint
from hpcllm.errors import CheckpointError, CollectiveError, DataError
from hpcllm.mpi.collective_errors import on_all, on_root
from hpcllm.mpi.wait import WORK, meet, together
from hpcllm.system.text import printable_path

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Input, output and settings of `prepare`. Raises DataError for a value out of range.

    inputs: files and folders; none: the source of the Python standard library. field: key of the text in a line of
    .jsonl, column of a table. vocabulary: of a tokenizer to be trained; one that is given keeps its own. template: of
    chats, a name of chat_template.NAMES; "": the inputs are text.
    """

    inputs: tuple[Path, ...] = ()
    output: Path
    field: str = "text"
    vocabulary: int = 4096
    tokenizer: Path | None = None
    validation_fraction: float = 0.02
    seed: int = 0
    template: str = ""

    def __post_init__(self) -> None:
        smallest, largest = tokenizer.SMALLEST_VOCABULARY, LARGEST_VOCABULARY
        if not 0 <= self.validation_fraction < 1:
            raise DataError(f"validation_fraction = {self.validation_fraction}; valid: 0 <= fraction < 1")
        if not smallest <= self.vocabulary <= largest:
            raise DataError(
                f"vocabulary = {self.vocabulary}; valid: {smallest} (every byte and the end of text) to {largest}"
            )
        if not 0 <= self.seed < 2**63:
            raise DataError(f"seed = {self.seed}; valid: 0 <= seed < 2^63")
        if self.template and self.template not in NAMES:
            raise DataError(f"template = {self.template!r}; valid: {', '.join(NAMES)}")
        if self.template and not self.inputs:
            raise DataError("chats need inputs: files of rows with messages, prompt and completion, or preferences")


def prepare(options: PrepareOptions, comm: MPI.Intracomm) -> PrepareReport:
    """Write the token store `options.output`, over an older one. Returns the same report on every rank.

    Collective over comm. Raises DataError before any work for an impossible input, output or tokenizer, and later if an
    input changes meanwhile; CollectiveError if a rank fails. An older store then stays as it was.
    """
    start_s = MPI.Wtime()
    given, source = on_root(comm, lambda: _check(options))
    _share_threads(comm)
    units, skipped, names = _my_units(options, comm)
    read_of: list[int] = []  # documents of each unit

    with ExitStack() as cleanup:
        rows = on_all(comm, lambda: cleanup.enter_context(_row_reader(options, source, given)))

        def read(label: str, total_bytes: int) -> Iterator[Document | Problem]:
            items = (item for unit in units for item in _counted(read_documents(unit, rows), read_of))
            return show_progress(items, label, total_bytes, comm)

        folder = on_root(comm, lambda: _make_folder(options.output))
        if comm.rank == 0:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        index = on_all(comm, lambda: index_documents(read("reading", 0), options.seed, options.validation_fraction))
        files = list(zip((unit.path for unit in units), read_of, strict=True))
        kind = _kind(index, comm)
        assignment = assign_splits(index, options.validation_fraction, comm, 2 if kind == "preferences" else 1)
        _check_any_left(index, assignment, comm)
        tokenizer_json, cuts = given, 0
        if tokenizer_json is None:
            sample = index.sample.gather(assignment.stays, comm)
            say_training(sample, options.vocabulary)
            cuts = tokenizer.long_words(sample)
            tokenizer_json = _on_first(comm, lambda: tokenizer.train(sample, options.vocabulary, source.controls))
        encoder = on_all(comm, lambda: tokenizer.Encoder(tokenizer_json))
        texts = (item for item in read("tokenizing", sum(index.sizes)) if isinstance(item, Document))
        named = _disk_errors(options.output)
        tokenized = on_all(
            comm, named(lambda: store_writer.tokenize(texts, index, assignment, encoder, folder, comm.rank))
        )
        facts = replace(
            _header(tokenized, assignment, encoder, comm),
            kind=kind,
            template=source.text,
            template_variables=source.variables or {},
            sources=_sources(files, assignment, names, 2 if kind == "preferences" else 1, comm),
        )
        header = _write_store(options, facts, tokenized, assignment, encoder, folder / "store.h5", comm)
    dropped = gather_problems([index.problems, tokenized.duplicates], comm)
    report = PrepareReport(
        path=options.output,
        ranks=comm.size,
        seconds=MPI.Wtime() - start_s,
        vocabulary=header.vocabulary,
        tokenizer_trained=given is None,
        long_words_cut=cuts,
        documents=header.documents,
        tokens=header.tokens,
        bytes=header.bytes,
        skipped=skipped,
        dropped=dropped,
        kind=header.kind,
        counted=header.counted if header.kind != "text" else header.tokens,
        zstd19_bits_per_byte=header.zstd19_bits_per_byte,
        fingerprint=header.fingerprint,
    )
    return cast(PrepareReport, together(comm, "to end", lambda: comm.bcast(report)))


def _check(options: PrepareOptions) -> tuple[str | None, TemplateSource]:
    """Check before any work that it can end well. Returns the JSON of a tokenizer that was given, and the template."""
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
    source = (
        own_template(options.tokenizer) if options.template == OWN else TEMPLATES.get(options.template, NO_TEMPLATE)
    )
    given = tokenizer.load(options.tokenizer) if options.tokenizer else None
    if given and options.template == PLAIN:
        source = replace(source, variables={"eos_token": tokenizer.end_of_text_of(given)})
    has = tokenizer.controls_of(given) if given else dict.fromkeys(source.controls, True)
    if missing := [token for token in source.controls if not has.get(token)]:
        raise DataError(
            f"the tokenizer {str(options.tokenizer)!r} lacks {', '.join(missing)}, special tokens of the template "
            f"{options.template}; spelled with others, any text could forge them. Valid: --template plain, which needs "
            "no more than an end of text, its own template (--template tokenizer), or no tokenizer, to have one trained"
        )
    return given, source


@contextmanager
def _row_reader(options: PrepareOptions, source: TemplateSource, given: str | None) -> Iterator[RowReader]:
    """Yield what makes documents of rows on this rank; of a foreign template, with a process while the block lasts."""
    if not options.template:
        yield TextRows(options.field)
        return
    controls = tokenizer.controls_of(given) if given else dict.fromkeys((END_OF_TEXT, *source.controls), True)
    with open_template(source, controls) as template:
        yield ChatRows(template)


def _kind(index: DocumentIndex, comm: MPI.Intracomm) -> str:
    """Return the one kind of all documents. Collective over comm. Raises DataError for preferences among others."""
    counts = np.array([index.kinds[kind] for kind in KINDS], np.int64)
    comm.Allreduce(MPI.IN_PLACE, counts)
    found = {kind: int(count) for kind, count in zip(KINDS, counts, strict=True) if count}

    def check() -> None:
        if len(found) > 1:
            raise DataError(
                f"the inputs hold {found['chat']:,} conversations and {found['preferences']:,} pairs of preferences; "
                "prepare them apart, a store has one kind"
            )

    on_root(comm, check)
    return next(iter(found), "text")


def _counted(items: Iterator[Document | Problem], counts: list[int]) -> Iterator[Document | Problem]:
    """Pass on what a unit holds, and add the number of its documents to the counts."""
    count = 0
    for item in items:
        count += isinstance(item, Document)
        yield item
    counts.append(count)


def _sources(
    files: Sequence[tuple[str, int]],
    assignment: Assignment,
    names: Mapping[str, str],
    documents_each: int,
    comm: MPI.Intracomm,
) -> tuple[Run, ...]:
    """Tell the sources of the documents that stay. documents_each: stored of each that was read. Collective."""
    mine = joined(tally(files, assignment.stays, assignment.validation, names))
    every = together(comm, "to tell where documents came from", lambda: comm.allgather(mine))
    runs = joined(run for part in every for run in part)
    told = runs if len({run.name for run in runs}) > 1 and len(runs) <= MOST_RUNS else []
    return tuple(Run(name, train * documents_each, held_out * documents_each) for name, train, held_out in told)


def _my_units(options: PrepareOptions, comm: MPI.Intracomm) -> tuple[list[Unit], dict[str, int], dict[str, str]]:
    """Walk the folders on rank 0; each rank gets its own units only, and the names of all sources. Collective."""
    shares: list[list[Unit]] = []
    skipped: Counter[str] = Counter()

    def find() -> dict[str, str]:
        shares.extend(share(find_units(options.inputs, skipped), comm.size))
        return name_inputs(options.inputs) or {"": ""}

    names = on_root(comm, find)
    mine = together(comm, "to get their share of the files", lambda: comm.scatter(shares or None))
    return mine, dict(skipped), names


def _make_folder(output: Path) -> Path:
    """Make a folder beside the output. Older ones are of killed runs; should one be alive, it fails and we go on."""
    for left in glob.glob(f".{glob.escape(output.name)}.*.partial", root_dir=output.parent):
        shutil.rmtree(output.parent / left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    """Name the folder where the disk rejects a write. To be used as a decorator of what runs on one rank."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        where = printable_path(str(output.absolute().parent))
        raise CollectiveError(f"cannot write in {where}: {getattr(error, 'strerror', None) or error}") from error


def _check_any_left(index: DocumentIndex, assignment: Assignment, comm: MPI.Intracomm) -> None:
    """Raise DataError with the reasons if no rank has a document that stays. Collective over comm."""
    if any(amount.documents for amount in assignment.total.values()):
        return
    problems = gather_problems([index.problems], comm)
    reasons = ", ".join(f"{dropped.count} x {reason}" for reason, dropped in problems.items())

    def fail() -> None:
        raise DataError(f"no document is left of what was read: {reasons or 'the files hold no lines'}")

    on_root(comm, fail)


def _header(
    tokenized: store_writer.Tokenized, assignment: Assignment, encoder: tokenizer.Encoder, comm: MPI.Intracomm
) -> Header:
    """Add up what all ranks have tokenized. Collective over comm."""
    spills = [tokenized.spills[split] for split in SPLITS]
    _, total = before_and_total([*(spill.tokens for spill in spills), *(spill.counted for spill in spills)], comm)
    return Header(
        vocabulary=encoder.vocabulary,
        end_of_text=encoder.end_of_text,
        fingerprint=store_fingerprint(encoder.tokenizer_json, comm.allreduce(tokenized.fingerprint)),
        documents={split: assignment.total[split].documents for split in SPLITS},
        tokens=dict(zip(SPLITS, total[: len(SPLITS)], strict=True)),
        counted=dict(zip(SPLITS, total[len(SPLITS) :], strict=True)),
        bytes={split: assignment.total[split].bytes for split in SPLITS},
        zstd19_bits_per_byte=_zstd19_bits_per_byte(tokenized.validation_text, comm),
    )


def _write_store(
    options: PrepareOptions,
    header: Header,
    tokenized: store_writer.Tokenized,
    assignment: Assignment,
    encoder: tokenizer.Encoder,
    path: Path,
    comm: MPI.Intracomm,
) -> Header:
    """Write the file `path` by all ranks and rename it to the output. Collective over comm."""
    before, _ = before_and_total([tokenized.spills[split].tokens for split in SPLITS], comm)
    following = {split: b"".join(comm.allgather(tokenized.spills[split].head)[comm.rank + 1 :]) for split in SPLITS}
    contents = store_writer.Contents(
        header, encoder.tokenizer_json, encoder.token_bytes, options.seed, options.validation_fraction
    )
    named = _disk_errors(options.output)
    offsets = _on_first(comm, named(lambda: store_writer.create(path, contents)))

    def write_slabs() -> None:
        for split, tokens_before in zip(SPLITS, before, strict=True):
            documents_before = assignment.before[split].documents
            spill = tokenized.spills[split]
            spill.write(path, split, offsets, tokens_before, documents_before, following[split])

    on_all(comm, named(write_slabs))
    specs = contents.index().datasets
    mine = on_all(comm, named(lambda: store_writer.block_checksums(path, specs, offsets, comm.rank, comm.size)))
    checksums = gather_array(mine, comm)
    _on_first(comm, named(lambda: store_writer.finish(path, options.output, contents, offsets, checksums)))
    return header


def _zstd19_bits_per_byte(validation_text: bytearray, comm: MPI.Intracomm) -> float:
    """Compress the beginning of the validation text on one rank, in one stream: a yardstick to check by hand."""
    text = gather_array(np.frombuffer(validation_text, np.uint8), comm)
    figure = 8 * len(zstandard.compress(text.tobytes(), 19)) / len(text) if len(text) else math.nan
    return together(comm, "to compress a sample of the text", lambda: float(comm.bcast(figure)), WORK)


def _on_first(comm: MPI.Intracomm, function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and broadcast its result; any error, a library's too, ends all ranks. Collective."""
    mine = on_all(comm, lambda: function() if comm.rank == 0 else None)
    return cast(T, together(comm, "to hear from rank 0", lambda: comm.bcast(mine)))


def _share_threads(comm: MPI.Intracomm) -> None:
    """Share the cores of a node among its ranks' tokenizers, unless the user or the affinity has. Collective."""
    meet(comm, "to share cores")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, min(bound, cores // node.size))))
    node.Free()
