"""States to save, and what comes back: drawn alike on all ranks, any bits, parts of any length. Pure but for numpy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcllm.course.lab import LawError

Values = NDArray[np.float32]
NAMES = ("weight", "exp_avg", "exp_avg_sq", "bias", "loss_scale")


@dataclass(frozen=True)
class State:
    """Arrays by name, whole, and where each is cut: as many borders as ranks, and one more."""

    arrays: Mapping[str, Values]
    borders: Mapping[str, Sequence[int]]

    def parts(self, rank: int) -> dict[str, Values]:
        """Return copies of a rank's parts."""
        return {
            name: array[self.borders[name][rank] : self.borders[name][rank + 1]].copy()
            for name, array in self.arrays.items()
        }

    def share(self, rank: int, ranks: int) -> dict[str, Values]:
        """Return what a rank gets of arrays that are cut evenly into so many parts in some order of the longer ones."""
        return {name: np.array_split(array, ranks)[rank] for name, array in self.arrays.items()}

    def own_bytes(self, rank: int) -> int:
        return sum(part.nbytes for part in self.parts(rank).values())


def draw(drawn: random.Random, n: int, ranks: int) -> State:
    """Draw a state of some arrays of about n values: any bits, NaNs too."""
    arrays, borders = {}, {}
    for name in drawn.sample(NAMES, drawn.randrange(2, len(NAMES))):
        length = max(ranks, n + drawn.randrange(-n // 4, n // 4 + 1))
        bits = np.random.default_rng(drawn.getrandbits(64)).integers(0, 1 << 32, length, np.uint32)
        arrays[name] = bits.view(np.float32)
        borders[name] = [0, *sorted(drawn.randrange(length + 1) for _ in range(ranks - 1)), length]
    return State(arrays, borders)


def path_of(folder: Path, step: int) -> Path:
    """Return the path that a checkpoint has to have."""
    return folder / f"step_{step}.ckpt"


def compare(found: Any, step: int, wanted: Mapping[str, Values], place: str) -> None:
    """Compare what `load` returned. Raises LawError."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise LawError("names", f"{place}: load returns {type(found).__name__}, not (step, dict of arrays)")
    if found[0] != step:
        raise LawError("step", f"{place}: load returns step {found[0]}, not {step}")
    if list(found[1]) != list(wanted):
        raise LawError("names", f"{place}: load returns {list(found[1])}, saved were {list(wanted)}")
    for name, values in wanted.items():
        _compare_array(name, found[1][name], values, place)


def _compare_array(name: str, found: Any, wanted: Values, place: str) -> None:
    if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.shape != wanted.shape:
        seen = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        raise LawError("cut", f"{place}: {name} is {seen}, not float32 {list(wanted.shape)}")
    bits, right = found.view(np.uint32), wanted.view(np.uint32)
    wrong = np.flatnonzero(bits != right)
    if wrong.size:
        said = f"{place}: {wrong.size} of {wanted.size} values of {name} are others, the first at {wrong[0]}"
        raise LawError("misplaced", said)
