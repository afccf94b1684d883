"""Group the virtual stages of a layout, and its pipeline ranks, that take equally long: few of hundreds differ.

    70 blocks, 5 ranks of 7 chunks, 2 a node      E: embedding, H: head, ->: to a rank of its node, =>: of another

    stage      0    1    2    3    4    5  ...  34        stages that differ: 7
               E2-> 2=>  2-> =>2 -> 2=>  2-> ...  2H       ranks: 3, the first one, the last one, all others

So hundreds of times are a few, and a list that says which of them each stage has. Lists are found once for all layouts
that are cut and lie on nodes alike, whatever their precision, codecs, recomputation or microbatches. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from hpcllm.config.schema import ModelConfig
from hpcllm.pipeline.actions import Placement
from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Device
from hpcllm.plan.models import Model, StageKind, cut, homes_of, kind_of, kinds_of, placement_of
from hpcllm.plan.time.topology import Way, stride, way_between

T = TypeVar("T", bound=Hashable)


class StageLike(NamedTuple):
    """A virtual stage, as far as its times depend on it."""

    kind: StageKind
    after: Way | None  # to the next stage; None: that is on the same rank, or there is no pipeline
    before: Way | None


class Alike(NamedTuple):
    """The stages and ranks that differ, and for each of all the place of the one that it is like."""

    stages: list[StageLike]
    of_stages: list[int]
    ranks: list[tuple[StageKind, ...]]  # kinds of the chunks of a rank
    of_ranks: list[int]
    messages: dict[Way, tuple[int, int]]  # two pipeline ranks with such a path from the first to the second


def alike(model: Model, layout: Layout, device: Device) -> Alike:
    """Group the stages and ranks of a layout."""
    cut_as, placed_as = (model.shape, layout.trainer == "hpcllm"), (device.per_node, device.per_package)
    return _alike(*cut_as, placement_of(layout), stride(layout, "pp"), *placed_as)


@lru_cache(maxsize=1 << 11)
def _alike(
    shape: ModelConfig, by_cost: bool, placement: Placement, step: int, per_node: int, per_package: int
) -> Alike:
    spans, homes = cut(shape, placement.stages, by_cost), homes_of(placement)
    messages: dict[Way, tuple[int, int]] = {}

    def path(source: int, target: int) -> Way | None:
        if source == target:
            return None
        found = way_between(source, target, placement.ranks, step, per_node, per_package)
        messages.setdefault(found, (source, target))
        return found

    around = zip(spans, homes, (*homes[1:], homes[-1]), (homes[0], *homes[:-1]), strict=True)
    stages = [StageLike(kind_of(span), path(here, after), path(here, before)) for span, here, after, before in around]
    ranks = [kinds_of(spans, placement, rank) for rank in range(placement.ranks)]
    return Alike(*_different(stages), *_different(ranks), messages)


def _different(every: Sequence[T]) -> tuple[list[T], list[int]]:
    """Return those that differ from all before them, and for each of all its place among these."""
    places = {one: place for place, one in enumerate(dict.fromkeys(every))}
    return list(places), [places[one] for one in every]
