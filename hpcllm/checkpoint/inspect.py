"""Read every block of a checkpoint once, by all ranks together: verify it, or describe it for people and programs.

rank 0   [0][1][2][3]                  a contiguous share of the file each, read by a few threads
rank 1               [4][5][6][7]      ---> all the damage there is, on every rank   (verify_file)

step_00001000.h5   14.2 MB   86 tensors, 14.1 MB in 96 blocks, all as they were written   (describe, tree_lines)
step 1000, written 2026-05-01T12:00:00+00:00, by 4 ranks, mesh dp=2 pp=1 tp=2, writer offsets, hpcllm 0.1.0, torch 2.7.0
|-- data
|   `-- @position = 32000
`-- model
    `-- embedding.weight float32 (8192, 128)  4.2 MB  norm 20.51

Needs neither MPI nor torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcllm.checkpoint.layout import Block, as_float64, block_bytes, blocks_of, my_blocks
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.errors import CheckpointError
from hpcllm.mpi.collective_errors import rank_and_size
from hpcllm.system.text import fitted, printable, size_text

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class Damage:
    """A block that could not be read as it was written."""

    dataset: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int  # of its bytes in the file
    bytes: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Result for one file."""

    path: Path
    bytes: int  # of tensors, as values
    blocks: int
    seconds: float
    damage: list[Damage]
    fault: str  # of the file as a whole; empty if header and tables are sound

    @property
    def is_sound(self) -> bool:
        return not self.damage and not self.fault

    def as_dict(self) -> dict[str, Any]:
        gb_s = None if self.fault else self.bytes / self.seconds / 1e9
        return {**dataclasses.asdict(self), "path": str(self.path), "sound": self.is_sound, "gb_s": gb_s}

    def lines(self) -> list[str]:
        name = printable(str(self.path))
        if self.fault:
            return [f"{name}: DAMAGED: {printable(self.fault)}"]
        rate = f"{size_text(self.bytes)} in {self.seconds:.1f} s, {self.bytes / self.seconds / 1e9:.2f} GB/s"
        if not self.damage:
            return [f"{name}: all {self.blocks} blocks are as they were written ({rate})"]
        head = f"{name}: DAMAGED: {len(self.damage)} of {self.blocks} blocks are not as they were written ({rate})"
        return [head, *(f"  {damage_line(dataclasses.asdict(item))}" for item in self.damage)]


def verify_file(path: Path, comm: MPI.Intracomm | None, advance: Callable[[int], None]) -> Report:
    """Check all of a file; the same report on all ranks. Collective over comm. advance: as in find_damage."""
    started_s = time.perf_counter()
    try:
        with Checkpoint.open(path, comm) as checkpoint:
            damage = find_damage(checkpoint, advance)
            specs = checkpoint.specs.values()
            size, blocks = sum(spec.bytes for spec in specs), sum(spec.blocks for spec in specs)
            return Report(path, size, blocks, time.perf_counter() - started_s, damage, "")
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{path}: ")
        return Report(path, 0, 0, time.perf_counter() - started_s, [], fault)


def damage_line(item: Mapping[str, Any]) -> str:
    """'bytes 4096-8191: model/head.weight from (0, 0), shape (16, 64), has changed ...'; item: a Damage as a dict."""
    return f"bytes {item['offset']}-{item['offset'] + item['bytes'] - 1}: {printable(item['reason'])}"


def survey(
    checkpoint: Checkpoint, blocks: Sequence[Block], work: Callable[[Block, np.ndarray], T]
) -> Iterator[tuple[Block, T | Damage]]:
    """Yield work(block, its values) of each block, or its damage; in their order, by threads. Not collective."""

    def attempt(block: Block) -> T | Damage:
        try:
            return work(block, checkpoint.read_block(*block))
        except CheckpointError as error:
            stored = checkpoint.datasets[block[0]]
            slab, why = stored.block(block[1]), str(error).removeprefix(f"{checkpoint.path}: ")
            return Damage(slab.dataset, slab.start, slab.shape, *stored.extent(block[1]), why)

    yield from zip(blocks, map_ahead(attempt, blocks, rank_and_size(checkpoint.comm)[1]), strict=True)


def find_damage(checkpoint: Checkpoint, advance: Callable[[int], None] = lambda _: None) -> list[Damage]:
    """List every damaged block of the file, on all ranks; none if it is sound. Collective over checkpoint.comm.

    advance: is given the number of bytes that this rank has read, as it does.
    """
    specs = checkpoint.specs
    found: list[Damage] = []
    for block, result in survey(checkpoint, my_blocks(specs, *rank_and_size(checkpoint.comm)), lambda *_: None):
        advance(block_bytes(specs, block))
        found += [result] if result else []
    if checkpoint.comm:
        found = list(itertools.chain.from_iterable(checkpoint.comm.allgather(found)))
    return found


def describe(checkpoint: Checkpoint, advance: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Describe all but the tensors' values, ready for JSON; each tensor with its norm. All of the file is read.

    {"path", "file_bytes", "tensor_bytes", "packed", "attributes": {key: value}, "datasets": {name: {"shape", "dtype",
    "bytes", "stored_bytes", "blocks", "damaged", "norm"}}, "damage": [{"dataset", "start", "shape", ...}]}
    norm: sqrt of the sum of squares; None for whole numbers, or if it is not finite, or if a block is damaged.
    advance: is given the number of bytes read, as they are. Not collective.
    """
    squares: dict[str, float] = {}
    damage: list[Damage] = []
    specs = checkpoint.specs
    for block, found in survey(checkpoint, blocks_of(specs), lambda *both: _squares(checkpoint, *both)):
        advance(block_bytes(specs, block))
        if isinstance(found, Damage):
            damage.append(found)
        else:
            squares[block[0]] = squares.get(block[0], 0.0) + found
    damaged = {name: sum(item.dataset == name for item in damage) for name in {item.dataset for item in damage}}
    datasets = {name: _dataset(checkpoint, name, squares, damaged.get(name, 0)) for name in checkpoint.datasets}
    return {
        "path": str(checkpoint.path),
        "file_bytes": checkpoint.file_bytes,
        "tensor_bytes": sum(item["bytes"] for item in datasets.values()),
        "packed": checkpoint.is_packed,
        "attributes": dict(checkpoint.attributes),
        "datasets": datasets,
        "damage": [dataclasses.asdict(item) for item in damage],
    }


def tree_lines(found: Mapping[str, Any], columns: int = 0) -> list[str]:
    """Draw the result of `describe` as a tree. columns: of a tensor's line, at the cost of its bytes; 0: any number."""
    return [*_head(found), *_branches(_nested(found), "", columns)]


def _squares(checkpoint: Checkpoint, block: Block, values: np.ndarray) -> float:
    dtype = checkpoint.datasets[block[0]].spec.dtype
    if "float" not in dtype:
        return 0.0
    with np.errstate(over="ignore"):
        numbers = as_float64(values, dtype).reshape(-1)
        return float(np.dot(numbers, numbers))


def _dataset(checkpoint: Checkpoint, name: str, squares: Mapping[str, float], damaged: int) -> dict[str, Any]:
    stored = checkpoint.datasets[name]
    total = squares.get(name, 0.0)
    is_known = "float" in stored.spec.dtype and math.isfinite(total) and not damaged
    return {
        "shape": list(stored.spec.shape),
        "dtype": stored.spec.dtype,
        "bytes": stored.spec.bytes,
        "stored_bytes": sum(stored.extent(index)[1] for index in range(stored.spec.blocks)),
        "blocks": stored.spec.blocks,
        "damaged": damaged,
        "norm": math.sqrt(total) if is_known else None,
    }


def _head(found: Mapping[str, Any]) -> list[str]:
    datasets, damage = found["datasets"].values(), found["damage"]
    blocks = sum(item["blocks"] for item in datasets)
    state = f"{len(damage)} DAMAGED" if damage else "all as they were written"
    kind = "an archive, " if found["packed"] else ""
    held = f"{kind}{len(datasets)} tensors, {size_text(found['tensor_bytes'])} in {blocks} blocks, {state}"
    name = printable(Path(found["path"]).name)
    lines = [f"{name}   {size_text(found['file_bytes'])}   {held}", *_written(found["attributes"])]
    return lines + [f"damaged: {damage_line(item)}" for item in damage]


def _written(facts: Mapping[str, Any]) -> list[str]:
    """One line on when, by whom and with what; none if the file does not say."""
    ranks = facts.get("written/ranks")
    mesh = " ".join(f"{key[9:]}={value}" for key, value in facts.items() if key.startswith("run/mesh/"))
    told = [
        f"step {facts['run/step']}" if "run/step" in facts else "",
        f"written {facts['run/written_at']}" if "run/written_at" in facts else "",
        f"by {ranks} rank{'s' if ranks != 1 else ''}" if ranks else "",
        f"mesh {mesh}" if mesh else "",
        f"writer {facts['written/writer']}" if "written/writer" in facts else "",
        *(f"{name} {facts[key]}" for name in ("hpcllm", "torch") if (key := f"run/versions/{name}") in facts),
    ]
    line = ", ".join(part for part in told if part)
    return [printable(line)] if line else []


def _nested(found: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts by path; leaves are parts of a tensor's line, or an attribute's lines, '@' before its name."""
    leaves: dict[str, tuple[str, ...] | list[str]] = {}
    leaves |= {name: _dataset_parts(item) for name, item in found["datasets"].items()}
    for key, value in found["attributes"].items():
        group, _, name = key.rpartition("/")
        is_text = isinstance(value, str) and "\n" in value
        lines = ["=", *map(printable, value.splitlines())] if is_text else [f"= {value!r}"]
        leaves[f"{group}/@{name}".lstrip("/")] = lines
    tree: dict[str, Any] = {}
    for path in sorted(leaves, key=_by_number):
        *groups, last = path.split("/")
        branch = tree
        for group in groups:
            branch = branch.setdefault(printable(group), {})
        branch[printable(last)] = leaves[path]
    return tree


def _by_number(path: str) -> str:
    """Sorts blocks.2 before blocks.10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(20), path)


LESS_NEEDED = (4, 2, 1)  # of the parts of a tensor's line: type and shape tell its bytes


def _dataset_parts(item: Mapping[str, Any]) -> tuple[str, ...]:
    shape = f"({', '.join(map(str, item['shape']))})"
    stored = f"stored in {size_text(item['stored_bytes'])}" if item["stored_bytes"] != item["bytes"] else ""
    blocks = f"{item['blocks']} blocks" if item["blocks"] > 1 and not item["damaged"] else ""
    return f"{item['dtype']} {shape}", size_text(item["bytes"]), stored, _norm_text(item), blocks


def _norm_text(item: Mapping[str, Any]) -> str:
    if item["damaged"]:
        return f"{item['damaged']} of {item['blocks']} blocks DAMAGED"
    if "float" not in item["dtype"]:
        return ""
    return f"norm {item['norm']:.4g}" if item["norm"] is not None else "NOT FINITE"


def _branches(tree: Mapping[str, Any], indent: str, columns: int) -> list[str]:
    lines = []
    width = max((len(name) for name, item in tree.items() if not isinstance(item, dict)), default=0)
    for number, (name, item) in enumerate(tree.items(), start=1):
        fork, stem = ("`-- ", "    ") if number == len(tree) else ("|-- ", "|   ")
        if isinstance(item, dict):
            lines += [f"{indent}{fork}{name}", *_branches(item, indent + stem, columns)]
            continue
        start = f"{indent}{fork}{name:<{width}} "
        if isinstance(item, tuple):
            lines.append(start + fitted(item, LESS_NEEDED, columns and max(columns - len(start), 1)))
        else:
            lines.append(start + item[0])
            lines += [f"{indent}{stem}    {line}".rstrip() for line in item[1:]]
    return lines
