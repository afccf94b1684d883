"""Pass 2: documents are read again, tokenized, and put on disk until it is known where in the store they begin.

    documents --same digest as in pass 1?--> batches --> ids + end of text --> train.rank        lengths: 8 bytes of
                        no: DataError                                      `-> validation.rank   memory a document

What must not depend on the number of ranks is made here from each document and its global place: its fingerprint, and
this rank's part of the validation text on which `zstd -19` is measured.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.census import Census, Placement
from hpcllm.data.documents import Document
from hpcllm.data.normal import DIGEST_BYTES, digest
from hpcllm.data.report import Problems
from hpcllm.data.store import SPLITS, Split, document_fingerprint, token_dtype
from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import DataError

BATCH_CHARACTERS = 2 * 2**20  # tokenized in one call of the library
ZSTD_BYTES = 16 * 2**20
DUPLICATE = "exact duplicate"


class Spool:
    """This rank's tokens of one split: a file of ids, and how many belong to each document."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self._lengths = array("q")
        self._file = open(path, "xb", buffering=2**20)  # noqa: SIM115 (whoever makes a spool closes it)

    def append(self, ids: NDArray[np.uint32]) -> None:
        self._file.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(len(ids))

    def close(self) -> None:
        self._file.close()

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def ends(self) -> NDArray[np.int64]:
        """(documents,) one past the last token of each, counted from this rank's first."""
        return np.cumsum(np.array(self._lengths, np.int64))

    @property
    def tokens(self) -> int:
        return sum(self._lengths)


@dataclass
class Spooled:
    """What pass 2 leaves on this rank."""

    spools: dict[Split, Spool]
    fingerprint: int = 0  # sum over this rank's documents
    validation_text: bytearray = field(default_factory=bytearray)
    duplicates: Problems = field(default_factory=Problems)


def spool_tokens(
    documents: Iterator[Document], census: Census, placement: Placement, encoder: Encoder, folder: Path, rank: int
) -> Spooled:
    """Tokenize the documents that stay. Not collective.

    Raises DataError if the documents are not those of pass 1, or if tokens do not stand for all bytes of a document.
    """
    dtype = token_dtype(encoder.vocabulary)
    with ExitStack() as files:
        spools = {split: files.enter_context(closing(Spool(folder / f"{split}.{rank}", dtype))) for split in SPLITS}
        result = Spooled(spools)
        staying = _staying(documents, census, placement, result.duplicates)
        for batch in _batches(staying):
            encoded = encoder.encode([document.text for _, document in batch])
            for (split, document), ids in zip(batch, encoded, strict=True):
                _check_lossless(document, ids, encoder)
                _keep(result, split, document, ids, placement)
    return result


def _staying(
    documents: Iterator[Document], census: Census, placement: Placement, duplicates: Problems
) -> Iterator[tuple[Split, Document]]:
    """What was counted in pass 1 must come again: places in the store are laid out for it."""
    index, expected, last = 0, memoryview(census.digests), ""
    for index, document in enumerate(documents, 1):
        last = document.origin
        if digest(document.text) != expected[(index - 1) * DIGEST_BYTES : index * DIGEST_BYTES]:
            raise _changed(f"at {last}")
        if placement.stays[index - 1]:
            yield placement.split_of(index - 1), document
        else:
            duplicates.add(DUPLICATE, document.origin)
    if index != len(placement.stays):
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


def _keep(result: Spooled, split: Split, document: Document, ids: NDArray[np.uint32], placement: Placement) -> None:
    spool = result.spools[split]
    result.fingerprint += document_fingerprint(split, placement.before[split].documents + spool.documents, ids)
    spool.append(ids)
    if split == "validation":
        room = ZSTD_BYTES - placement.before[split].bytes - len(result.validation_text)
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
