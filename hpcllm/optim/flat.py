"""Which parameters lie together in one flat array: their gradients are summed, and their weights gathered, at once.

    parameters in forward order    e0  w1  n1  w2  n2  w3      e, n: always exact (embeddings, norms, biases)
    coded arrays, last one first       [   1   ][   0   ]      w:    by the codecs of gradients and parameters
    exact arrays                   [  2  : e0 n1 n2 ]          numbers: the order in which backward completes them

    dp = 3 replicas share array 0   [ w3 . . | . . . | . w2 ]  each owns one stretch, cut anywhere

What is treated differently never shares an array: exact or coded, split over tp or whole on each of its ranks, summed
over tp, shared with the other end of the pipeline; with weights that come and go by units also the unit. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What all parameters of one array have in common."""

    exact: bool  # never through a lossy codec
    whole: bool = True  # on every tp rank; else each has its part
    summed: bool = False  # each tp rank has a part of the gradient's sum
    shared: bool = False  # the tied embedding, of which the other end of the pipeline has a copy
    unit: str = ""  # that its weights come and go with; "": they stay


@dataclass(frozen=True)
class Flat:
    """Parameters that lie one after another in one array, in backward order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements, as this rank has them
    traits: Traits

    @property
    def size(self) -> int:
        return sum(self.sizes)


def lay_out(sizes: Mapping[str, int], traits: Callable[[str], Traits], array_values: float) -> list[Flat]:
    """Arrays of about so many values, in the order in which the backward pass completes them; the shared one last.

    sizes: name -> elements, in forward order. An array is cut once it has reached array_values.
    """
    kinds: dict[Traits, dict[str, int]] = {}
    place = {name: number for number, name in enumerate(reversed(list(sizes)))}
    for name in place:
        kinds.setdefault(traits(name), {})[name] = sizes[name]
    flats = [flat for kind, names in kinds.items() for flat in _cut(kind, names, array_values)]
    return sorted(flats, key=lambda flat: (flat.traits.shared, place[flat.names[-1]]))


def _cut(traits: Traits, sizes: Mapping[str, int], array_values: float) -> list[Flat]:
    groups: list[list[str]] = []
    filled = math.inf
    for name, size in sizes.items():
        if filled >= array_values:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [Flat(tuple(names), tuple(sizes[name] for name in names), traits) for names in groups]
