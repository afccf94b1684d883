"""Token stores straight from the writer, and the same with a front that lies, rightly sealed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_checkpoints import index_of, seal_as

from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.data import store_writer
from hpcllm.data.store import SPLITS, Header, document_fingerprint, store_fingerprint, token_dtype
from hpcllm.data.token_spill import TokenSpill

TOKENIZER = "{}"


def write_store(output: Path, vocabulary: int = 300, documents: int = 5, tokens: int = 0) -> Path:
    """Write a store; document i of a split has i + 1 tokens, or `tokens`."""
    spills, total = {}, 0
    for split in SPLITS:
        spill = spills[split] = TokenSpill(output.with_name(split), token_dtype(vocabulary))
        for i in range(documents):
            ids = np.full(tokens or i + 1, (vocabulary - 1) * (i % 2), np.uint32)
            total += document_fingerprint(split, i, ids)
            spill.append(ids)
        spill.close()
    header = Header(
        vocabulary=vocabulary,
        end_of_text=0,
        fingerprint=store_fingerprint(TOKENIZER, total),
        documents=dict.fromkeys(SPLITS, documents),
        tokens={split: spills[split].tokens for split in SPLITS},
        bytes=dict.fromkeys(SPLITS, 100),
        zstd19_bits_per_byte=2.0,
    )
    contents = store_writer.Contents(header, TOKENIZER, np.ones(vocabulary, np.uint32), 0, 0.5)
    aside = output.with_name("aside")
    offsets = store_writer.create(aside, contents)
    for split in SPLITS:
        spills[split].write(aside, split, offsets, 0, 0)
        output.with_name(split).unlink()
        output.with_name(f"{split}.counted").unlink()
    checksums = store_writer.block_checksums(aside, contents.index().datasets, offsets)
    store_writer.finish(aside, output, contents, offsets, checksums)
    return output


def lie(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index of a store and seal it again, as someone would who means harm."""
    index = index_of(path)
    change(index)
    seal_as(path, json.dumps(index).encode(), _extents(index))


def _extents(index: dict[str, Any]) -> list[tuple[int, int]]:
    """Place and size of the datasets, as far as they make sense."""
    known = [(DatasetSpec(tuple(shape), dtype), place) for dtype, shape, place in index["datasets"].values() if place]
    return [(place, spec.bytes) for spec, place in known if spec.dtype in STORED_AS]


def put(path: Path, dataset: str, place: int, values: np.ndarray) -> None:
    """Write values from an element of a dataset on, and make its checksums true again."""
    index = index_of(path)
    with Checkpoint.open(path) as file:
        specs = file.specs
    places = {name: item[2] for name, item in index["datasets"].items()}
    with path.open("r+b") as whole:
        whole.seek(places[dataset] + place * values.itemsize)
        whole.write(values.tobytes())
    sums = store_writer.block_checksums(path, specs, places)
    with path.open("r+b") as whole:
        whole.seek(index["tables"]["checksums"])
        whole.write(sums.tobytes())
    seal_as(path, json.dumps(index).encode(), _extents(index))
