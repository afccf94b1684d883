"""What is in a checkpoint, for people and for programs; needs neither MPI nor torch.

step_00001000.h5   14.2 MB
|-- data @position = 32000
|-- model
|   `-- embedding.weight   float32 (8192, 128)   4.2 MB   norm 20.51
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.slabs import Slab
from hpcllm.printable import printable, size_text

_PIECE_ELEMENTS = 1 << 22


def describe(path: Path) -> dict[str, Any]:
    """Everything but the tensors' values, ready for JSON; each tensor with its norm. Raises CheckpointError.

    {"path", "file_bytes", "attributes": {key: value}, "datasets": {name: {"shape", "dtype", "bytes", "slabs", "norm"}}}
    slabs: pieces that ranks wrote. norm: sqrt of the sum of squares; None for whole numbers or if it is not finite.
    """
    with Checkpoint.open(path) as checkpoint:
        checkpoint.verify()
        return {
            "path": str(path),
            "file_bytes": checkpoint.file_bytes,
            "attributes": dict(checkpoint.attributes),
            "datasets": {name: _dataset(checkpoint, name) for name in checkpoint.datasets},
        }


def tree_lines(path: Path) -> list[str]:
    """The same as `describe`, drawn. Raises CheckpointError."""
    found = describe(path)
    lines = [f"{Path(path).name}   {size_text(found['file_bytes'])}"]
    return lines + _branches(_nested(found), "")


def _dataset(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    stored = checkpoint.datasets[name]
    return {
        "shape": list(stored.spec.shape),
        "dtype": stored.spec.dtype,
        "bytes": stored.spec.bytes,
        "slabs": len(stored.checksums),
        "norm": _norm(checkpoint, name) if "float" in stored.spec.dtype else None,
    }


def _norm(checkpoint: Checkpoint, name: str) -> float | None:
    spec = checkpoint.datasets[name].spec
    total = 0.0
    for slab in _pieces(name, spec):
        values = _as_float64(checkpoint.read(slab), spec.dtype)
        total += float(np.vdot(values, values))
    return math.sqrt(total) if math.isfinite(total) else None


def _pieces(name: str, spec: DatasetSpec) -> list[Slab]:
    """Slabs of whole rows, of about _PIECE_ELEMENTS each."""
    if not spec.shape:
        return [Slab(name, (), ())]
    rows, rest = spec.shape[0], spec.shape[1:]
    step = max(1, _PIECE_ELEMENTS // math.prod(rest))
    zeros = (0,) * len(rest)
    return [Slab(name, (row, *zeros), (min(step, rows - row), *rest)) for row in range(0, rows, step)]


def _as_float64(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN of any kind is what we are here to report
        return values.astype(np.float64)


def _nested(found: dict[str, Any]) -> dict[str, Any]:
    """A tree of dicts by path; its leaves are lists of lines. The name of an attribute has an '@' in front."""
    leaves = {name: [_dataset_text(item)] for name, item in found["datasets"].items()}
    for key, value in found["attributes"].items():
        group, _, name = key.rpartition("/")
        leaves[f"{group}/@{name}".lstrip("/")] = _attribute_lines(value)
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


def _dataset_text(item: dict[str, Any]) -> str:
    shape = f"({', '.join(map(str, item['shape']))})"
    is_float = "float" in item["dtype"]
    norm = "" if not is_float else f"   norm {item['norm']:.6g}" if item["norm"] is not None else "   NOT FINITE"
    slabs = "" if item["slabs"] == 1 else f"   {item['slabs']} slabs"
    return f"{item['dtype']} {shape}   {size_text(item['bytes'])}{norm}{slabs}"


def _attribute_lines(value: Any) -> list[str]:
    if isinstance(value, str) and "\n" in value:
        return ["=", *map(printable, value.splitlines())]
    return [f"= {value!r}"]


def _branches(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    width = max((len(name) for name, item in tree.items() if isinstance(item, list)), default=0)
    for number, (name, item) in enumerate(tree.items(), start=1):
        fork, stem = ("`-- ", "    ") if number == len(tree) else ("|-- ", "|   ")
        if isinstance(item, dict):
            lines += [f"{indent}{fork}{name}", *_branches(item, indent + stem)]
        else:
            lines.append(f"{indent}{fork}{name:<{width}} {item[0]}")
            lines += [f"{indent}{stem}    {line}".rstrip() for line in item[1:]]
    return lines
