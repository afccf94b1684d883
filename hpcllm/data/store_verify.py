"""Whole verification of a token store, by all ranks: what open and training sample is here done for every byte.

    blocks      XXH3 of every block as it was written              checkpoint/inspect.py, for any file of ours
    documents   each begins where the one before ends              --+
    tokens      every id is of the vocabulary                        +-- a contiguous share of the documents a rank
    counted     as many targets as the front says                   --+
    fingerprint that of tokenizer and tokens is what the store says --+

The fingerprint was made from the tokens before they went to disk, so it also finds what a checksum taken afterwards
cannot: a write that went wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcllm.checkpoint.inspect import Report, verify_file
from hpcllm.data.store import (
    SPLITS,
    Split,
    TokenStore,
    check_documents,
    check_ids,
    document_fingerprint,
    is_store,
    store_fingerprint,
)
from hpcllm.errors import CheckpointError, DataError
from hpcllm.mpi.collective_errors import on_all, on_root, rank_and_size

if TYPE_CHECKING:
    from mpi4py import MPI

BATCH_DOCUMENTS = 2**16  # looked at in one step: bounds of 512 KiB
BATCH_BYTES = 2**20


def verify(path: Path, comm: MPI.Intracomm | None, advance: Callable[[int], None]) -> Report:
    """Check all of a checkpoint or token store; the same report on all ranks. Collective over comm.

    advance: is given the number of bytes that this rank has read, as it does.
    """
    report = verify_file(path, comm, advance)
    if not report.is_sound or not on_root(comm, lambda: is_store(path)):
        return report
    try:
        _check_contents(TokenStore.open(path, comm), comm, advance)
    except (CheckpointError, DataError) as error:
        return dataclasses.replace(report, fault=str(error).removeprefix(f"{path}: "))
    return report


def _check_contents(store: TokenStore, comm: MPI.Intracomm | None, advance: Callable[[int], None]) -> None:
    """Raise on all ranks if documents, ids or fingerprint are not what the store says. Collective over comm."""
    rank, ranks = rank_and_size(comm)
    mine = on_all(comm, lambda: sum(_sum_of_documents(store, split, rank, ranks, advance) for split in SPLITS))
    for split in store.header.counted:
        on_root(comm, partial(_check_counted, store, split))
    found = store_fingerprint(store.tokenizer_json, comm.allreduce(mine) if comm else mine)
    if found != store.fingerprint:
        raise CheckpointError(f"its contents have the fingerprint {found}, its front says {store.fingerprint}")


def _sum_of_documents(store: TokenStore, split: Split, rank: int, ranks: int, advance: Callable[[int], None]) -> int:
    """Sum the fingerprints of this rank's share of a split's documents. Not collective. Raises CheckpointError."""
    total, count = 0, store.header.documents[split]
    if not count:
        return 0
    bounds, tokens = store.documents(split), store.tokens(split)
    end = (rank + 1) * count // ranks
    for first in range(rank * count // ranks, end, BATCH_DOCUMENTS):
        part = np.array(bounds[first : min(first + BATCH_DOCUMENTS, end) + 1])
        check_documents(part, len(tokens), split)
        check_ids(tokens[part[0] : part[-1]], store.vocabulary, split)
        for position, (start, stop) in enumerate(pairwise(part.tolist()), first):
            total += document_fingerprint(split, position, tokens[start:stop], store.counted_of(split, start, stop))
        advance(int(part[-1] - part[0]) * tokens.itemsize)
    return total


def _check_counted(store: TokenStore, split: Split) -> None:
    """Raise CheckpointError if other than the told number of bits is set, those behind the last token included."""
    bits = store.counted(split)
    found = 0 if bits is None else sum(int(np.unpackbits(part).sum()) for part in _parts(bits))
    if found != (told := store.header.counted[split]):
        raise CheckpointError(f"/{split}/counted has {found:,} bits set, its front says {told:,}")


def _parts(bits: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [bits[start : start + BATCH_BYTES] for start in range(0, len(bits), BATCH_BYTES)]
