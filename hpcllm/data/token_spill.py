"""Tokens of one rank and split on their way to the store: on disk until it is known where in the store they begin.

    ids         one file, in the type of the store                                  --copied--> /train/tokens
    targets     one file, a byte a token, of chats alone                            --packed--> /train/counted
    lengths     8 bytes of memory a document                                        --summed--> /train/documents

Eight bits share a byte, and ranks begin anywhere in one. A byte belongs to the rank that has its first token; the bits
behind this rank's last token come from the heads of the ranks after it, which all ranks have exchanged:

    rank 0   t t t t t t t t | t t t             writes bytes 0 and 1, with five bits of rank 1's head
    rank 1                           t t t t t | t t t ...       begins to write at byte 2
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.data.store import Split
from hpcllm.system.raw_files import write_at

COPY_BYTES = 16 * 2**20
HEAD = 7  # tokens that can share a byte with the rank before


class TokenSpill:
    """Tokens of one rank and split: a file of ids, one of targets if it has any, and the length of each document."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self.counted = 0  # targets
        self.head = b""  # of the targets, a byte a token
        self._lengths = array("q")
        self._file = open(path, "xb", buffering=2**20)  # noqa: SIM115 (the caller closes it)
        self._targets = open(self._targets_path, "xb", buffering=2**20)  # noqa: SIM115

    @property
    def _targets_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.counted")

    def append(self, ids: NDArray[np.uint32], counted: NDArray[np.bool_] | None = None) -> None:
        """Add a document. counted: which of its tokens are targets; None: of text, where all are."""
        self._file.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(len(ids))
        if counted is not None:
            flags = counted.astype(np.uint8).tobytes()
            self._targets.write(flags)
            self.counted += int(counted.sum())
            self.head += flags[: HEAD - len(self.head)]

    def close(self) -> None:
        try:
            self._file.close()  # a full disk may be met here
        finally:
            self._targets.close()

    @property
    def documents(self) -> int:
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        return sum(self._lengths)

    def write(
        self,
        path: Path,
        split: Split,
        offsets: Mapping[str, int],
        tokens_before: int,
        documents_before: int,
        following: bytes = b"",
    ) -> None:
        """Copy into the store that rank 0 created. Not collective; on the disk when it returns.

        tokens_before, documents_before: of the whole split, on the ranks before this one. following: heads of the ranks
        after this one, joined.
        """
        ends, first = tokens_before + np.cumsum(np.array(self._lengths, np.int64)), documents_before + 1
        if documents_before == 0:  # the first to write adds the leading 0; ranks before it have no documents
            ends, first = np.concatenate([[0], ends]), 0
        offset = offsets.get(f"{split}/tokens", 0) + tokens_before * self.dtype.itemsize  # none where no rank has any
        with open(path, "r+b", buffering=0) as store, open(self.path, "rb") as tokens:
            while data := tokens.read(COPY_BYTES):
                write_at(store.fileno(), data, offset)
                offset += len(data)
            if f"{split}/counted" in offsets:
                self._write_targets(store.fileno(), offsets[f"{split}/counted"], tokens_before, following)
            write_at(store.fileno(), ends.astype("<i8").tobytes(), offsets[f"{split}/documents"] + 8 * first)
            os.fsync(store.fileno())

    def _write_targets(self, store: int, offset: int, tokens_before: int, following: bytes) -> None:
        """Write the bytes whose first token is of this rank."""
        skipped = -tokens_before % 8
        if self.tokens <= skipped:
            return
        offset += (tokens_before + skipped) // 8
        with open(self._targets_path, "rb") as targets:
            targets.seek(skipped)
            while flags := targets.read(COPY_BYTES):  # a multiple of 8, but for the last
                flags += following[: -len(flags) % 8]
                packed = np.packbits(np.frombuffer(flags, np.uint8), bitorder="little").tobytes()
                write_at(store, packed, offset)
                offset += len(packed)
