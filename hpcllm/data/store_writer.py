"""Pass 2: documents are read again and tokenized; then all ranks write one token store, without a parallel HDF5.

    documents --same digest as in pass 1?--> batches --> ids + end of text --> train.rank        lengths: 8 bytes of
                        no: DataError                                      `-> validation.rank   memory a document

Tokens are spilled to disk until it is known where in the store they begin (token_spill.py). Then

    rank 0   creates every dataset contiguous, allocated, not filled; asks for its offset; closes; offsets --> all
    rank r   | ... | slab of rank r | ... |      pwrite at offset + first item x item size, fsync
    rank r   XXH3 of its share of all blocks, read back --> rank 0
    rank 0   checksums, attributes, header, fsync; renames the file into its place, fsyncs the folder

The bytes depend on the contents alone: no times, no names of machines or folders, so any number of ranks writes the
same file. Fingerprint and validation text (measured with `zstd -19`) are made from each document and its global place.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcllm.checkpoint import file_layout
from hpcllm.checkpoint.header import Index, header_bytes
from hpcllm.checkpoint.layout import TOKENIZER, Attribute, DatasetSpec, block_bytes, checksum, my_blocks
from hpcllm.data.chat import ChatDocument
from hpcllm.data.dedup import DIGEST_BYTES, Assignment, DocumentIndex, digest
from hpcllm.data.documents import Document
from hpcllm.data.prepare_report import Problems
from hpcllm.data.sources import to_text
from hpcllm.data.store import (
    FORMAT,
    SPLITS,
    TOKEN_BYTES,
    VERSION,
    Header,
    Split,
    document_fingerprint,
    token_dtype,
)
from hpcllm.data.token_spill import TokenSpill
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError
from hpcllm.system.raw_files import read_at, write_at

BATCH_CHARACTERS = 2 * 2**20  # tokenized in one call of the library
ZSTD_BYTES = 16 * 2**20
DUPLICATE = "exact duplicate"
Encoded = tuple[NDArray[np.uint32], NDArray[np.bool_] | None]  # ids, which are targets


@dataclass
class Tokenized:
    """Result of pass 2 on this rank."""

    spills: dict[Split, TokenSpill]
    fingerprint: int = 0  # sum over this rank's documents
    validation_text: bytearray = field(default_factory=bytearray)
    duplicates: Problems = field(default_factory=Problems)


@dataclass(frozen=True)
class Contents:
    """All of a store but tokens and documents."""

    header: Header
    tokenizer_json: str
    token_bytes: NDArray[np.uint32]
    seed: int
    validation_fraction: float

    def index(self) -> Index:
        """Return what the front of the file will say, places aside."""
        header, tokenizer = self.header, DatasetSpec((len(self.tokenizer_json.encode("utf-8")),), "uint8")
        counts = {"documents": header.documents, "tokens": header.tokens, "bytes": header.bytes}
        attributes: dict[str, Attribute] = {
            "format": FORMAT,
            "version": VERSION,
            "kind": header.kind,
            "vocabulary": header.vocabulary,
            "end_of_text": header.end_of_text,
            "seed": self.seed,
            "validation_fraction": self.validation_fraction,
            "fingerprint": header.fingerprint,
            **{f"{split}_{name}": by_split[split] for split in SPLITS for name, by_split in counts.items()},
        }
        if header.kind != "text":
            variables = json.dumps(dict(header.template_variables))
            attributes |= {"template": header.template, "template_variables": variables}
            attributes |= {f"{s}_counted": header.counted[s] for s in SPLITS}
        if header.sources:
            attributes["sources"] = to_text(header.sources)
        if not math.isnan(header.zstd19_bits_per_byte):
            attributes["zstd19_bits_per_byte"] = header.zstd19_bits_per_byte
        return Index({**header.specs(), TOKENIZER: tokenizer}, attributes)


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
            for (split, document), encoded in zip(batch, _encode([d for _, d in batch], encoder), strict=True):
                _check_lossless(document, np.concatenate([ids for ids, _ in encoded]), encoder)
                for ids, counted in encoded:
                    _keep(result, split, ids, counted, assignment)
                _keep_text(result, split, document, assignment)
    return result


def create(path: Path, contents: Contents) -> dict[str, int]:
    """Make the file, unfinished, with everything but tokens and documents. Returns byte offsets by dataset name."""
    index = contents.index()
    offsets = file_layout.allocate_datasets(path, index.datasets, header_bytes(index))
    with open(path, "r+b", buffering=0) as file:
        write_at(file.fileno(), contents.token_bytes.astype("<u4").tobytes(), offsets[TOKEN_BYTES])
        write_at(file.fileno(), contents.tokenizer_json.encode("utf-8"), offsets[TOKENIZER])
        os.fsync(file.fileno())
    return offsets


def block_checksums(
    path: Path, specs: Mapping[str, DatasetSpec], offsets: Mapping[str, int], rank: int = 0, ranks: int = 1
) -> NDArray[np.uint64]:
    """Read a rank's share of a file's blocks, all of them written, and return their checksums. Not collective.

    Shares are contiguous: joined in rank order they are those of all blocks, in the order of the file.
    """
    found = []
    with open(path, "rb", buffering=0) as file:
        for name, index in my_blocks(specs, rank, ranks):
            block = specs[name].block(name, index)
            data = bytearray(block_bytes(specs, (name, index)))
            read_at(file.fileno(), memoryview(data), offsets[name] + specs[name].block_offset(block))
            found.append(checksum(data))
    return np.array(found, np.uint64)


def finish(
    path: Path, output: Path, contents: Contents, offsets: Mapping[str, int], checksums: NDArray[np.uint64]
) -> None:
    """Write the front of a file that is otherwise whole and give it its name, over an older store if there is one."""
    index = contents.index()
    size = header_bytes(index)
    file_layout.finish(path, output, dataclasses.replace(index, offsets=offsets), size, checksums)


def _staying(
    documents: Iterator[Document], index: DocumentIndex, assignment: Assignment, duplicates: Problems
) -> Iterator[tuple[Split, Document]]:
    """Pass on the documents that stay. All documents of pass 1 must come again: the store is laid out for them."""
    count, expected, last = 0, memoryview(index.digests), ""
    for count, document in enumerate(documents, 1):
        last = document.origin
        if digest(document.identity) != expected[(count - 1) * DIGEST_BYTES : count * DIGEST_BYTES]:
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


def _encode(documents: Sequence[Document], encoder: Encoder) -> list[list[Encoded]]:
    """Return of each document what is stored of it: its tokens, or those of each of its conversations."""
    chats = [document.rendered for document in documents if isinstance(document, ChatDocument)]
    if not chats:
        return [[(ids, None)] for ids in encoder.encode([document.text for document in documents])]
    encoded = iter(encoder.encode_chats([chat for row in chats for chat in row]))
    return [[next(encoded) for _ in row] for row in chats]


def _keep(
    result: Tokenized, split: Split, ids: NDArray[np.uint32], counted: NDArray[np.bool_] | None, assignment: Assignment
) -> None:
    spill, before = result.spills[split], assignment.before[split]
    result.fingerprint += document_fingerprint(split, before.documents + spill.documents, ids, counted)
    spill.append(ids, counted)


def _keep_text(result: Tokenized, split: Split, document: Document, assignment: Assignment) -> None:
    """Keep the beginning of the validation text, over all ranks."""
    before = assignment.before[split]
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
