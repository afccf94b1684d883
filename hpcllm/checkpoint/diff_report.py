"""What differs between two checkpoints, for people and for programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hpcllm.checkpoint.diff import Difference, TensorDifference
from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.printable import printable

_LONGEST = 60  # characters of a value in a line


def as_dict(a: Path, b: Path, found: Difference) -> dict[str, Any]:
    """Ready for JSON. "facts" and "written": key -> [in a, in b], null where it is not."""
    return {
        "a": str(a),
        "b": str(b),
        "same": found.is_none,
        **dataclasses.asdict(found),
        "specs": {name: [dataclasses.asdict(spec) for spec in pair] for name, pair in found.specs.items()},
    }


def lines(a: Path, b: Path, found: Difference) -> list[str]:
    """One line for each difference, what counts first."""
    counted = [f"{printable(name)} is only in {side}" for side, names in _only(found) for name in names]
    counted += [f"{printable(name)}: {_pair(*map(_spec, pair))}" for name, pair in found.specs.items()]
    counted += [f"{printable(name)}: {_tensor(tensor)}" for name, tensor in found.tensors.items()]
    counted += [f"@{printable(key)}: {_pair(*map(_value, pair))}" for key, pair in found.facts.items()]
    told = [f"(@{printable(key)}: {_pair(*map(_value, pair))})" for key, pair in found.written.items()]
    end = f"{len(counted)} difference{'s' if len(counted) > 1 else ''}" if counted else "the same"
    return [f"a = {printable(str(a))}", f"b = {printable(str(b))}", *counted, *told, end]


def _only(found: Difference) -> tuple[tuple[str, list[str]], ...]:
    return ("a", found.only_a), ("b", found.only_b)


def _pair(one: str, other: str) -> str:
    return f"{one} in a, {other} in b"


def _spec(spec: DatasetSpec) -> str:
    return f"{spec.dtype} ({', '.join(map(str, spec.shape))})"


def _tensor(found: TensorDifference) -> str:
    share = f"{found.differing:,} of {found.elements:,} elements differ"
    return (
        f"{share}, by at most {_number(found.max_absolute)} (relative {_number(found.max_relative)}), "
        f"first at {list(found.first or ())}"
    )


def _number(value: float | None) -> str:
    return "a number that is not finite" if value is None else f"{value:.3g}"


def _value(value: Any) -> str:
    if value is None:
        return "not there"
    text = printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
