"""Compare two checkpoints, whatever layout wrote them and whether packed or not: what differs, and by how much.

    attributes, keys of the run file     by value
    tensors                              name, shape, type; then block by block:

        a   [ 7f.. ][ 03.. ][ c1.. ]     the same cuts in every file, and the same checksums of equal blocks
        b   [ 7f.. ][ 9a.. ][ c1.. ]
                    `---- compared element by element; the others are read and match their checksums

How a file was written (when, by which ranks and versions) is reported, but does not make two files differ.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcllm.checkpoint.layout import DatasetSpec, as_float64
from hpcllm.checkpoint.reader import Checkpoint, map_ahead
from hpcllm.system.text import printable

CONFIG = "run/config"
_HOW = ("run/written_at", "run/mesh/", "run/versions/", "written/", f"{CONFIG}/mesh.")  # it was written, not what
_LONGEST = 60  # characters of a value in a line


@dataclass(frozen=True)
class TensorDifference:
    """Difference of two tensors of one name. Maxima are None where a difference is not finite."""

    elements: int
    differing: int
    first: tuple[int, ...] | None  # index of the first element that differs, in C order
    max_absolute: float | None
    max_relative: float | None  # |a - b| / max(|a|, |b|)


@dataclass(frozen=True)
class Difference:
    """All differences of a file b from a file a."""

    facts: dict[str, tuple[Any, Any]]  # attributes and "run/config/<table>.<key>"; None: not there
    written: dict[str, tuple[Any, Any]]  # keys on how it was written, which do not count
    only_a: list[str]
    only_b: list[str]
    specs: dict[str, tuple[DatasetSpec, DatasetSpec]]
    tensors: dict[str, TensorDifference]  # of equal shapes

    @property
    def is_none(self) -> bool:
        return not (self.facts or self.only_a or self.only_b or self.specs or self.tensors)

    def as_dict(self, a: Path, b: Path) -> dict[str, Any]:
        """Ready for JSON. "facts" and "written": key -> [in a, in b], null where it is not."""
        return {
            "a": str(a),
            "b": str(b),
            "same": self.is_none,
            **dataclasses.asdict(self),
            "specs": {name: [dataclasses.asdict(spec) for spec in pair] for name, pair in self.specs.items()},
        }

    def lines(self, a: Path, b: Path) -> list[str]:
        """One line for each difference, those that count first."""
        counted = [f"{printable(name)} is only in {side}" for side in "ab" for name in getattr(self, f"only_{side}")]
        counted += [f"{printable(name)}: {_pair(*map(_spec_text, pair))}" for name, pair in self.specs.items()]
        counted += [f"{printable(name)}: {_tensor_text(tensor)}" for name, tensor in self.tensors.items()]
        counted += [f"@{printable(key)}: {_pair(*map(_value_text, pair))}" for key, pair in self.facts.items()]
        told = [f"(@{printable(key)}: {_pair(*map(_value_text, pair))})" for key, pair in self.written.items()]
        end = f"{len(counted)} difference{'s' if len(counted) > 1 else ''}" if counted else "the same"
        return [f"a = {printable(str(a))}", f"b = {printable(str(b))}", *counted, *told, end]


def difference(
    a: Checkpoint, b: Checkpoint, tolerance: float | None = None, advance: Callable[[int], None] = lambda _: None
) -> Difference:
    """Compare b with a, with no more than a few blocks in memory. Not collective.

    tolerance: None compares bits; else numbers are equal if |a - b| <= tolerance (1 + max(|a|, |b|)), or both NaN.
    advance: gets the bytes that were compared, as they are. Raises CheckpointError if what is read has changed.
    """
    facts, written = _facts(a.attributes, b.attributes)
    both = [name for name in a.datasets if name in b.datasets]
    specs = {name: (a.datasets[name].spec, b.datasets[name].spec) for name in both}
    tensors = {}
    for name, (one, other) in specs.items():
        if one.shape == other.shape and (found := _tensor(a, b, name, tolerance, advance)).differing:
            tensors[name] = found
    return Difference(
        facts,
        written,
        [name for name in a.datasets if name not in b.datasets],
        [name for name in b.datasets if name not in a.datasets],
        {name: pair for name, pair in specs.items() if pair[0] != pair[1]},
        tensors,
    )


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    one, other = dict(_flat(a)), dict(_flat(b))
    pairs = {key: (one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())}
    differ = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    how = {key: pair for key, pair in differ.items() if key.startswith(_HOW)}
    return {key: pair for key, pair in differ.items() if key not in how}, how


def _flat(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Attributes, the run file in keys of its own."""
    for key, value in attributes.items():
        try:
            tables = tomllib.loads(value) if key == CONFIG else {}
        except (ValueError, TypeError, RecursionError):  # not a run file of ours: compared as it is
            tables = {}
        yield from _keys(tables) if tables else [(key, value)]


def _keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for table, keys in tables.items():
        for key, value in keys.items() if isinstance(keys, dict) else [("", keys)]:
            yield f"{CONFIG}/{table}.{key}", value


def _tensor(
    a: Checkpoint, b: Checkpoint, name: str, tolerance: float | None, advance: Callable[[int], None]
) -> TensorDifference:
    one, other = a.datasets[name], b.datasets[name]

    def compare(index: int) -> TensorDifference | None:
        slab = one.block(index)
        values = a.read_block(name, index), b.read(slab)
        if one.spec == other.spec and one.checksums[index] == other.checksums[index]:
            return None
        found = _values(*values, one.spec.dtype, other.spec.dtype, tolerance)
        if found.first is None:
            return None
        return replace(found, first=tuple(s + at for s, at in zip(slab.start, found.first, strict=True)))

    found = []
    for index, block in enumerate(map_ahead(compare, range(one.spec.blocks))):
        advance(one.block(index).elements * one.spec.item_bytes)
        found += [block] if block else []
    return TensorDifference(
        math.prod(one.spec.shape),
        sum(block.differing for block in found),
        found[0].first if found else None,
        _largest([block.max_absolute for block in found]),
        _largest([block.max_relative for block in found]),
    )


def _values(a: np.ndarray, b: np.ndarray, dtype_a: str, dtype_b: str, tolerance: float | None) -> TensorDifference:
    """Compare one block: its bits where the types are the same and there is no tolerance, else its numbers."""
    one, other = as_float64(a, dtype_a), as_float64(b, dtype_b)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.abs(one - other)
        apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0  # infinities of one sign, and NaN
        larger = np.maximum(np.abs(one), np.abs(other))
        relative = np.divide(apart, larger, out=np.zeros_like(apart), where=apart != 0)
        if tolerance is not None:
            differs = ~((apart <= tolerance * (1 + larger)) & np.isfinite(apart)) & (apart != 0)
        elif dtype_a == dtype_b:
            bits = np.dtype(f"u{a.dtype.itemsize}")
            differs = a.view(bits) != b.view(bits)
        else:
            differs = apart != 0
    count = int(np.count_nonzero(differs))
    first = tuple(map(int, np.unravel_index(int(np.argmax(differs)), differs.shape))) if count else None
    largest = (float(values.max(initial=0.0)) for values in (apart, relative))
    return TensorDifference(a.size, count, first, *(value if math.isfinite(value) else None for value in largest))


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=0.0) if len(known) == len(values) else None


def _pair(one: str, other: str) -> str:
    return f"{one} in a, {other} in b"


def _spec_text(spec: DatasetSpec) -> str:
    return f"{spec.dtype} ({', '.join(map(str, spec.shape))})"


def _tensor_text(found: TensorDifference) -> str:
    share = f"{found.differing:,} of {found.elements:,} elements differ"
    return (
        f"{share}, by at most {_number_text(found.max_absolute)} (relative {_number_text(found.max_relative)}), "
        f"first at {list(found.first or ())}"
    )


def _number_text(value: float | None) -> str:
    return "a number that is not finite" if value is None else f"{value:.3g}"


def _value_text(value: Any) -> str:
    if value is None:
        return "not there"
    text = printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
