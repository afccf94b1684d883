"""Sets of cores and of nodes in the words of the kernel and of Slurm.

numbers("0-2,8")  -> (0, 1, 2, 8)         list_text((0, 1, 2, 8)) -> "0-2,8"
mask_text((1, 2)) -> "0x6"                nodes_text(["n1", "n2", "n07"]) -> "n[1-2],n07"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_STRETCH = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_END = re.compile(r"^(.*?)([0-9]*)$", re.DOTALL)


def numbers(text: str) -> tuple[int, ...]:
    """Of a list in the kernel's notation, in order; () for what is no such list."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        stretch = _STRETCH.fullmatch(part)
        if not stretch:
            return ()
        found.update(range(int(stretch[1]), int(stretch[2] or stretch[1]) + 1))
    return tuple(sorted(found))


def list_text(cores: Iterable[int]) -> str:
    """'0-2,8', as the kernel, taskset and Slurm take it."""
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs(cores))


def mask_text(cores: Iterable[int]) -> str:
    """A bit a core, in hexadecimal: as --cpu-bind=mask_cpu takes it."""
    return hex(sum(1 << core for core in set(cores)))


def nodes_text(names: Iterable[str], most: int | None = None) -> str:
    """'n[1-3,7]': names of nodes as --exclude and --nodelist take them; with more than `most` names: 'n[1-3], ...'."""
    ordered = list(dict.fromkeys(names))
    shown = ordered if most is None else ordered[:most]
    parts = [_split(name) for name in shown]
    padded = {(stem, len(digits)) for stem, digits in parts if len(digits) > 1 and digits.startswith("0")}
    groups: dict[tuple[str, int], list[int]] = {}
    for stem, digits in parts:  # 7 and 07 are different nodes
        width = len(digits) if (stem, len(digits)) in padded else 0 if digits else -1
        groups.setdefault((stem, width), []).append(int(digits) if digits else -1)
    text = ",".join(_group(stem, width, found) for (stem, width), found in groups.items())
    return text if len(shown) == len(ordered) else f"{text}, ... ({len(ordered)} nodes)"


def runs(values: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each stretch of neighbours."""
    first = last = None
    for value in sorted(set(values)):
        if first is None or last is None:
            first = last = value
        elif value == last + 1:
            last = value
        else:
            yield first, last
            first = last = value
    if first is not None and last is not None:
        yield first, last


def _split(name: str) -> tuple[str, str]:
    match = _END.match(name)
    return (match[1], match[2]) if match else (name, "")


def _group(stem: str, width: int, found: list[int]) -> str:
    if width < 0:  # no number at all
        return stem
    parts = [f"{a:0{width}}-{b:0{width}}" if b > a else f"{a:0{width}}" for a, b in runs(found)]
    return f"{stem}{parts[0]}" if len(parts) == 1 and "-" not in parts[0] else f"{stem}[{','.join(parts)}]"
