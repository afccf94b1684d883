"""Damage done to a checkpoint and to an archive of it, one bit, page or cut at a time: is each found, is any loaded?

    python perf/checkpoint_corruption.py [--count 1000] [--seed 0]

A checkpoint of a small model (bf16 weights, fp32 master weights and moments, tokenizer; tensors of one block and of
several) and its archive are each damaged `count` times: 70 % single flipped bits, 20 % truncations, the rest pages set
to zero, pages that change places, and bytes added. A flip or cut falls anywhere in the file, or, every other time,
anywhere in a region drawn first, so that small regions get their share. After each the file is looked at twice: by what
`python -m hpcllm checkpoint verify` calls, and by what a run that goes on does (the newest sound file is loaded: the
undamaged older one must be). Then the damage is undone. Writes checkpoint_corruption.json and .md beside this file;
a damage that was not found, or was loaded, ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.folder import DAMAGED, load_newest
from hpcllm.checkpoint.inspect import verify_file
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore, tokenizer_json
from hpcllm.checkpoint.state import RunState, Shards, save
from hpcllm.config.schema import ModelConfig, from_tables, to_tables
from hpcllm.errors import CheckpointError
from hpcllm.model.shapes import parameter_shapes
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece

HERE = Path(__file__).resolve().parent
LLAMA = ModelConfig(layers=2, hidden=192, heads=4, ffn=256, vocabulary=6000, max_sequence=64)
PAGE_BYTES = 4096
Edit = Callable[[], None]


@dataclass(frozen=True)
class Damage:
    kind: str
    region: str
    place: int  # byte of the file
    do: Edit
    undo: Edit


@dataclass(frozen=True)
class Outcome:
    kind: str
    region: str
    place: int
    called_sound: bool  # by verify
    loaded: bool  # a run went on from it
    reason: str  # that verify gave


def pieces(model: ModelConfig) -> list[Piece]:
    """All of a run's state as one rank of one process has it; empty."""
    found = []
    for name, shape in parameter_shapes(model).items():
        for kind in (MODEL, MASTER, EXP_AVG, EXP_AVG_SQ):
            dtype = torch.bfloat16 if kind == MODEL else torch.float32
            found.append(Piece(kind, name, 0, math.prod(shape), torch.zeros(math.prod(shape), dtype=dtype)))
    return found


def make_checkpoint(folder: Path, model: ModelConfig, step: int) -> Path:
    """As a run writes it, with values as training leaves them: normal weights, small moments."""
    generator, state = torch.Generator().manual_seed(step), pieces(model)
    scales = {MODEL: 0.02, MASTER: 0.02, EXP_AVG: 1e-4, EXP_AVG_SQ: 1e-9}
    for piece in state:
        piece.values.copy_(torch.randn(len(piece.values), generator=generator) * scales[piece.kind])
    config = to_tables(from_tables({"run": {"seed": 1}}))
    shapes = parameter_shapes(model)
    run = RunState(
        step=step,
        position=step * 32,
        updates=step,
        config=config,
        pieces=state,
        shards=Shards(shapes),
        owned=frozenset(shapes),
        fingerprint="f0",
        tokenizer_json=json.dumps({"model": {"vocab": {f"token{i}": i for i in range(model.vocabulary)}}}),
        mesh={"dp": 1, "pp": 1, "tp": 1},
    )
    return save(folder, run, MPI.COMM_SELF).path


def regions(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Which bytes (first, one past) of a file are what: every byte is in one region."""
    with Checkpoint.open(path) as checkpoint:
        datasets = checkpoint.datasets
    front = int(path.read_bytes()[:64].split()[5])
    index_bytes = len(path.read_bytes()[:front].rstrip(b"\0"))
    tensors = [
        (place, place + length)
        for stored in datasets.values()
        for place, length in map(stored.extent, range(stored.spec.blocks))
    ]
    tables = _tables(path, front, sum(stored.spec.blocks for stored in datasets.values()))
    found = {"index": [(0, index_bytes)], "rest of the front": [(index_bytes, front)], "tensors": tensors, **tables}
    taken = sorted(extent for extents in found.values() for extent in extents)
    ends = [0, *(end for _, end in taken)]
    gaps = [(a, b) for a, (b, _) in zip(ends, [*taken, (path.stat().st_size, 0)], strict=True) if a < b]
    return {**found, "HDF5 tables and gaps": gaps}


def _tables(path: Path, front: int, blocks: int) -> dict[str, list[tuple[int, int]]]:
    index = json.loads(path.read_bytes()[:front].split(b"\n", 1)[1].rstrip(b"\0"))
    words = {"checksums": 1, "packed": 3}
    return {f"/{name}": [(place, place + 8 * words[name] * blocks)] for name, place in index["tables"].items()}


class Damages:
    """Random damage to one file, as much as one likes."""

    def __init__(self, path: Path, rng: np.random.Generator) -> None:
        self.path, self.rng = path, rng
        self.regions = regions(path)
        self.size = path.stat().st_size

    def draw(self, count: int) -> Iterator[Damage]:
        kinds = [self.flip] * 7 + [self.cut] * 2 + [self.zero_page, self.swap_pages, self.extend]
        shares = [0.1] * 9 + [0.04, 0.04, 0.02]
        for number in range(count):
            kind = kinds[number % len(kinds)] if number < len(kinds) else kinds[self.rng.choice(len(kinds), p=shares)]
            yield kind()

    def flip(self) -> Damage:
        place, bit = self._place(), 1 << int(self.rng.integers(8))
        return self._write("a flipped bit", place, bytes([self._read(place, 1)[0] ^ bit]))

    def cut(self) -> Damage:
        place = self._place()
        rest = self._read(place, self.size - place)

        def undo() -> None:
            with self.path.open("ab") as file:
                file.write(rest)

        return Damage("a truncation", self.region(place), place, lambda: os.truncate(self.path, place), undo)

    def extend(self) -> Damage:
        more = self.rng.bytes(int(self.rng.choice([1, 8, PAGE_BYTES])))

        def do() -> None:
            with self.path.open("ab") as file:
                file.write(more)

        return Damage("bytes added", "the end", self.size, do, lambda: os.truncate(self.path, self.size))

    def zero_page(self) -> Damage:
        place = self._page(lambda page: any(page))
        return self._write("a page of zeros", place, bytes(PAGE_BYTES))

    def swap_pages(self) -> Damage:
        one = self._page(any)
        before = self._read(one, PAGE_BYTES)
        other = self._page(lambda page: page != before)
        first, second = min(one, other), max(one, other)
        between = self._read(first + PAGE_BYTES, second - first - PAGE_BYTES)
        swapped = self._read(second, PAGE_BYTES) + between + self._read(first, PAGE_BYTES)
        return self._write("pages swapped", first, swapped)

    def region(self, place: int) -> str:
        return next(name for name, parts in self.regions.items() if any(a <= place < b for a, b in parts))

    def _place(self) -> int:
        if self.rng.integers(2):
            return int(self.rng.integers(self.size))
        parts = self.regions[str(self.rng.choice(list(self.regions)))]
        at = int(self.rng.integers(sum(b - a for a, b in parts)))
        for a, b in parts:
            if at < b - a:
                return a + at
            at -= b - a
        raise AssertionError("a region is as long as its parts")

    def _page(self, fits: Callable[[bytes], bool]) -> int:
        while True:
            place = PAGE_BYTES * int(self.rng.integers(self.size // PAGE_BYTES))
            if fits(self._read(place, PAGE_BYTES)):
                return place

    def _read(self, place: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(place)
            return file.read(length)

    def _write(self, kind: str, place: int, changed: bytes) -> Damage:
        before = self._read(place, len(changed))
        return Damage(
            kind, self.region(place), place, lambda: self._put(place, changed), lambda: self._put(place, before)
        )

    def _put(self, place: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(place)
            file.write(content)


def campaign(folder: Path, path: Path, model: ModelConfig, count: int, rng: np.random.Generator) -> list[Outcome]:
    """Damage `path`, the newest checkpoint of its folder, `count` times; there is an older one that is sound."""
    before, outcomes, state = path.read_bytes(), [], pieces(model)
    aside = path.with_name(path.name + DAMAGED)

    def load(checkpoint: Checkpoint) -> Path:
        tokenizer_json(checkpoint)
        restore(checkpoint, Shards(parameter_shapes(model)), state)
        return checkpoint.path

    for damage in Damages(path, rng).draw(count):
        damage.do()
        report = verify_file(path, None, lambda _: None)
        found, _ = load_newest(folder, None, load)
        if aside.exists():
            aside.rename(path)
        reason = report.fault or "; ".join(item.reason for item in report.damage)
        outcomes.append(Outcome(damage.kind, damage.region, damage.place, report.is_sound, found == path, reason))
        damage.undo()
    if path.read_bytes() != before or load_newest(folder, None, load)[0] != path:
        raise CheckpointError(f"{path} is not what it was before it was damaged; this measurement is worth nothing")
    return outcomes


def run(count: int, seed: int, model: ModelConfig = LLAMA) -> dict[str, list[Outcome]]:
    """Outcomes for a checkpoint and for an archive."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as made:
        make_checkpoint(Path(made), model, 1)
        newest = make_checkpoint(Path(made), model, 2)
        found = {"checkpoint": campaign(Path(made), newest, model, count, rng)}
        plain = newest.rename(Path(made) / "plain.h5")
        compress(plain, newest, None)
        found["archive"] = campaign(Path(made), newest, model, count, rng)
    return found


def records(found: dict[str, list[Outcome]]) -> str:
    """JSON, one damage a line."""
    columns = ["kind", "region", "place", "called_sound", "loaded"]
    parts = [f'"columns": {json.dumps(columns)}']
    for file, outcomes in found.items():
        rows = [json.dumps([getattr(one, column) for column in columns]) for one in outcomes]
        parts.append(f"{json.dumps(file)}: [\n" + ",\n".join(rows) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(found: dict[str, list[Outcome]]) -> str:
    """Rows: what was done and where; columns: of how many, found by verify, not loaded."""
    rows = [
        "| file | damage | where it begins | tried | found by verify | not loaded |",
        "|---|---|---|---:|---:|---:|",
    ]
    for file, outcomes in found.items():
        groups = Counter((one.kind, one.region) for one in outcomes)
        for (kind, region), tried in sorted(groups.items()):
            some = [one for one in outcomes if (one.kind, one.region) == (kind, region)]
            verified, loaded = sum(not one.called_sound for one in some), sum(not one.loaded for one in some)
            rows.append(f"| {file} | {kind} | {region} | {tried} | {verified} | {loaded} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    found = run(arguments.count, arguments.seed)
    missed = [one for outcomes in found.values() for one in outcomes if one.called_sound or one.loaded]
    (HERE / "checkpoint_corruption.json").write_text(records(found), encoding="utf-8")
    body = (
        f"Made by checkpoint_corruption.py --count {arguments.count} --seed {arguments.seed}, which says how, in "
        f"{time.monotonic() - began_s:.0f} s.\n\n{table(found)}\n\n{sum(map(len, found.values()))} damages, "
        f"{len(missed)} of them not found by `verify` or loaded.\n"
    )
    (HERE / "checkpoint_corruption.md").write_text(body, encoding="utf-8")
    print(body)
    if missed:
        print(f"missed: {missed[:3]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
