"""All ranks write one token store at once, without a parallel HDF5.

    rank 0   creates every dataset contiguous, allocated, not filled; asks for its offset; closes; offsets --> all
    rank r   | ... | slab of rank r | ... |      pwrite at offset + first item x item size, fsync
    rank 0   sets complete, fsyncs, renames the file into its place, fsyncs the folder

The bytes depend on the contents alone: no times, no names of machines or folders, so any number of ranks writes the
same file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcllm.data.spool import Spool
from hpcllm.data.store import FORMAT, SPLITS, VERSION, Split, token_dtype
from hpcllm.raw_hdf5 import allocate, sync, write_at

COPY_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Contents:
    """What the header of a store says; totals over all ranks, by split."""

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


@dataclass(frozen=True)
class Slabs:
    """This rank's part of one split, and where it begins: in tokens and in documents of the whole split."""

    split: Split
    tokens_before: int
    documents_before: int
    spool: Spool

    def write(self, path: Path, offsets: dict[str, int]) -> None:
        """Into the file that rank 0 created. Not collective; on the disk when it returns."""
        item_bytes = self.spool.dtype.itemsize
        ends = self.tokens_before + self.spool.ends()
        if self.documents_before == 0:  # whoever is first writes the leading 0; others before it have no documents
            ends, first = np.concatenate([[0], ends]), 0
        else:
            first = self.documents_before + 1
        with open(path, "r+b", buffering=0) as file:
            _copy(self.spool.path, file.fileno(), offsets[f"{self.split}/tokens"] + self.tokens_before * item_bytes)
            write_at(file.fileno(), ends.astype("<i8").tobytes(), offsets[f"{self.split}/documents"] + 8 * first)
            os.fsync(file.fileno())


def finish(path: Path, output: Path) -> None:
    """Declare the file complete and give it its name, over an older store if there is one."""
    with h5py.File(path, "r+") as file:
        file.attrs["complete"] = True
    sync(path)
    os.replace(path, output)
    sync(output.parent)


def _attributes(contents: Contents) -> dict[str, Any]:
    counts = {
        f"{split}_{name}": values[split]
        for split in SPLITS
        for name, values in (
            ("documents", contents.documents),
            ("tokens", contents.tokens),
            ("bytes", contents.bytes),
        )
    }
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
        **counts,
    }


def _copy(source: Path, file: int, offset: int) -> None:
    with open(source, "rb") as tokens:
        while data := tokens.read(COPY_BYTES):
            write_at(file, data, offset)
            offset += len(data)
