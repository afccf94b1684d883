"""Pass 2: documents are read again and tokenized; then all ranks write one token store, without a parallel HDF5.

    documents --same digest as in pass 1?--> batches --> ids + end of text --> train.rank        lengths: 8 bytes of
                        no: DataError                                      `-> validation.rank   memory a document

Tokens are spilled to disk until it is known where in the store they begin. Then

    rank 0   creates every dataset contiguous, allocated, not filled; asks for its offset; closes; offsets --> all
    rank r   | ... | slab of rank r | ... |      pwrite at offset + first item x item size, fsync
    rank 0   sets complete, fsyncs, renames the file into its place, fsyncs the folder

The bytes depend on the contents alone: no times, no names of machines or folders, so any number of ranks writes the
same file. Fingerprint and validation text (measured with `zstd -19`) are made from each document and its global place.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcllm.data.dedup import DIGEST_BYTES, Assignment, DocumentIndex, digest
from hpcllm.data.documents import Document
from hpcllm.data.prepare_report import Problems
from hpcllm.data.store import FORMAT, SPLITS, VERSION, Split, document_fingerprint, token_dtype
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.system.raw_files import allocate, sync, write_at

BATCH_CHARACTERS = 2 * 2**20  # tokenized in one call of the library
COPY_BYTES = 16 * 2**20
ZSTD_BYTES = 16 * 2**20
DUPLICATE = "exact duplicate"


class TokenSpill:
    """This rank's tokens of one split: a file of ids, and the number of tokens of each document."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self._lengths = array("q")
        self._file = open(path, "xb", buffering=2**20)  # noqa: SIM115 (the caller closes it)

    def append(self, ids: NDArray[np.uint32]) -> None:
        self._file.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(len(ids))

    def close(self) -> None:
        self._file.close()

    @property
    def documents(self) -> int:
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        return sum(self._lengths)

    def write(
        self, path: Path, split: Split, offsets: dict[str, int], tokens_before: int, documents_before: int
    ) -> None:
        """Copy into the store that rank 0 created. Not collective; on the disk when it returns.

        tokens_before, documents_before: of the whole split, on the ranks before this one.
        """
        ends, first = tokens_before + np.cumsum(np.array(self._lengths, np.int64)), documents_before + 1
        if documents_before == 0:  # the first to write adds the leading 0; ranks before it have no documents
            ends, first = np.concatenate([[0], ends]), 0
        offset = offsets[f"{split}/tokens"] + tokens_before * self.dtype.itemsize
        with open(path, "r+b", buffering=0) as store, open(self.path, "rb") as tokens:
            while data := tokens.read(COPY_BYTES):
                write_at(store.fileno(), data, offset)
                offset += len(data)
            write_at(store.fileno(), ends.astype("<i8").tobytes(), offsets[f"{split}/documents"] + 8 * first)
            os.fsync(store.fileno())


@dataclass
class Tokenized:
    """Result of pass 2 on this rank."""

    spills: dict[Split, TokenSpill]
    fingerprint: int = 0  # sum over this rank's documents
    validation_text: bytearray = field(default_factory=bytearray)
    duplicates: Problems = field(default_factory=Problems)


@dataclass(frozen=True)
class Contents:
    """Header of a store; documents, tokens and bytes are totals over all ranks, by split."""

    tokenizer_json: str
    token_bytes: NDArray[np.uint32]
    end_of_text: int
    seed: int
    validation_fraction: float
    zstd19_bits_per_byte: float
    fingerprint: str
    documents: dict[Split, int]
    tokens: dict[Split, int]
    bytes: dict[Split, int]

    @property
    def vocabulary(self) -> int:
        return len(self.token_bytes)


def tokenize(
    documents: Iterator[Document],
    index: DocumentIndex,
    assignment: Assignment,
    encoder: Encoder,
    folder: Path,
    rank: int,
) -> Tokenized:
    """Tokenize the documents that stay and spill them to `folder`. Not collective.

    Raises DataError if the documents are not those of pass 1, or if tokens do not stand for all bytes of a document.
    """
    dtype = token_dtype(encoder.vocabulary)
    with ExitStack() as files:
        spills = {s: files.enter_context(closing(TokenSpill(folder / f"{s}.{rank}", dtype))) for s in SPLITS}
        result = Tokenized(spills)
        for batch in _batches(_staying(documents, index, assignment, result.duplicates)):
            encoded = encoder.encode([document.text for _, document in batch])
            for (split, document), ids in zip(batch, encoded, strict=True):
                _check_lossless(document, ids, encoder)
                _keep(result, split, document, ids, assignment)
    return result


def create(path: Path, contents: Contents) -> dict[str, int]:
    """Make the file, incomplete, with everything but tokens and documents. Returns byte offsets by dataset name."""
    with h5py.File(path, "x") as file:
        file.attrs.update(_attributes(contents))
        file.create_dataset("token_bytes", data=contents.token_bytes.astype("<u4"), track_times=False)
        tokenizer = np.frombuffer(contents.tokenizer_json.encode("utf-8"), np.uint8)
        file.create_dataset("tokenizer", data=tokenizer, track_times=False)
        offsets = {}
        for split in SPLITS:
            tokens, documents = f"{split}/tokens", f"{split}/documents"
            offsets[tokens] = allocate(file, tokens, (contents.tokens[split],), token_dtype(contents.vocabulary))
            offsets[documents] = allocate(file, documents, (contents.documents[split] + 1,), np.dtype("<i8"))
        return offsets


def finish(path: Path, output: Path) -> None:
    """Declare the file complete and give it its name, over an older store if there is one."""
    with h5py.File(path, "r+") as file:
        file.attrs["complete"] = True
    sync(path)
    os.replace(path, output)
    sync(output.parent)


def _attributes(contents: Contents) -> dict[str, Any]:
    counts = {"documents": contents.documents, "tokens": contents.tokens, "bytes": contents.bytes}
    return {
        "format": FORMAT,
        "version": VERSION,
        "complete": False,
        "vocabulary": contents.vocabulary,
        "end_of_text": contents.end_of_text,
        "seed": contents.seed,
        "validation_fraction": contents.validation_fraction,
        "zstd19_bits_per_byte": contents.zstd19_bits_per_byte,
        "fingerprint": contents.fingerprint,
        **{f"{split}_{name}": by_split[split] for split in SPLITS for name, by_split in counts.items()},
    }


def _staying(
    documents: Iterator[Document], index: DocumentIndex, assignment: Assignment, duplicates: Problems
) -> Iterator[tuple[Split, Document]]:
    """Pass on the documents that stay. All documents of pass 1 must come again: the store is laid out for them."""
    count, expected, last = 0, memoryview(index.digests), ""
    for count, document in enumerate(documents, 1):
        last = document.origin
        if digest(document.text) != expected[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]:
            raise _changed(f"at {last}")
        if assignment.stays[count - 1]:
            yield assignment.split_of(count - 1), document
        else:
            duplicates.add(DUPLICATE, document.origin)
    if count != len(assignment.stays):
        raise _changed(f"after {last}" if last else "at the first document")


def _batches(documents: Iterator[tuple[Split, Document]]) -> Iterator[list[tuple[Split, Document]]]:
    batch: list[tuple[Split, Document]] = []
    characters = 0
    for split, document in documents:
        batch.append((split, document))
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _keep(result: Tokenized, split: Split, document: Document, ids: NDArray[np.uint32], assignment: Assignment) -> None:
    spill, before = result.spills[split], assignment.before[split]
    result.fingerprint += document_fingerprint(split, before.documents + spill.documents, ids)
    spill.append(ids)
    if split == "validation":
        room = ZSTD_BYTES - before.bytes - len(result.validation_text)
        result.validation_text += document.text.encode("utf-8")[: max(room, 0)]


def _check_lossless(document: Document, ids: NDArray[np.uint32], encoder: Encoder) -> None:
    held = int(encoder.token_bytes[ids].sum())
    if held != document.size_bytes:
        raise DataError(
            f"the tokenizer loses text: {document.origin} has {document.size_bytes} bytes, its {len(ids)} tokens stand "
            f"for {held}; use another tokenizer, or none, to have one trained"
        )


def _changed(where: str) -> DataError:
    return DataError(f"the input changed while it was read ({where}); prepare from files that nobody writes to")
