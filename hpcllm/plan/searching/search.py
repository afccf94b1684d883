"""The fastest layouts of our trainer for a model on so many devices.

    shape: the least that its passes can take ----> flavour: with its messages over tp ----> leaf: with its schedule,
                                                    exchange over dp, optimizer ----> does it fit? ----> predicted

All wait in one queue, the least bound first. What comes out is opened: a shape into its flavours, these into leaves, a
leaf that does not fit into one that makes more again, one that fits into a prediction. As no layout is faster than its
bound, the search is over when as many as asked for are predicted that are faster than whatever waits: what is left
alone cannot be among them. Pure.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError, UserError
from hpcllm.model.shapes import StageSpan
from hpcllm.plan.fitting import check_fit
from hpcllm.plan.layouts import Layout, Shard
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.memory.least import SHARDS, least_bytes, states_bytes
from hpcllm.plan.models import Model, read_model
from hpcllm.plan.prediction import Known, Prediction, Step
from hpcllm.plan.searching.bound import ends_at_least
from hpcllm.plan.searching.constraints import Constraints, parse_constraints
from hpcllm.plan.searching.space import RECOMPUTE, Space
from hpcllm.plan.stages import HALVED, Alike
from hpcllm.plan.time.passes import Passes

HEADROOM = 0.05  # of the memory that a process can use: what predictions of it may be wrong by
MOST_DEVICES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was found, the best first, and what became of the rest."""

    machine: Machine
    model: Model
    devices: int
    global_batch: int
    constraints: Constraints
    best: tuple[Prediction, ...]
    counts: Mapping[str, int]  # predicted, does not fit, refused, slower (not looked at in full)
    refused: Mapping[str, int]  # by the words of the trainer
    nearest: Prediction | None  # if nothing fits: what lacks least memory
    headroom: float  # share of each device's memory that is left free

    @property
    def idle(self) -> int:
        """Devices that the best layout leaves without work, because no layout with all of them exists or fits."""
        return self.devices - self.best[0].layout.devices if self.best else 0


def search(
    machine: str | Path | Machine,
    model: str | Mapping[str, Any] | Model,
    devices: int,
    global_batch: int,
    *,
    sequence: int | None = None,
    top: int = 10,
    constraints: str | Sequence[str] | Constraints = (),
) -> Search:
    """The `top` fastest layouts that fit, each accepted by our trainer. Raises ConfigError."""
    for key, value, most in (
        ("devices", devices, MOST_DEVICES),
        ("global_batch", global_batch, 1 << 40),
        ("top", top, 1000),
    ):
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{key} = {value!r}; valid: a whole number from 1 to {most}")
    parsed = constraints if isinstance(constraints, Constraints) else parse_constraints(constraints)
    space = Space(
        machine=read_machine(machine),
        model=read_model(model, sequence),
        devices=devices,
        global_batch=global_batch,
        constraints=parsed,
    )
    state = _BestFirst(space, top)
    state.run(space.shapes())
    if not state.found:
        state.run(space.shapes(fewer=True))
    return state.result()


@dataclass(order=True)
class _Entry:
    """One layout or several that begin alike; their steps take no less than the bound."""

    bound_s: float
    number: int  # of equals the first comes out first
    layouts: int = field(compare=False)
    open: Callable[[], None] = field(compare=False)


class _BestFirst:
    """The state of a search."""

    def __init__(self, space: Space, top: int) -> None:
        self.space, self.top = space, top
        self.found: list[tuple[tuple[float, ...], Prediction]] = []  # sorted
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.nearest: tuple[float, Layout] | None = None
        self._entries: list[_Entry] = []
        self._numbers = itertools.count()
        self._passes: dict[Layout, dict[Alike, Passes]] = {}
        self._works: dict[tuple[int, int], float] = {}
        self._whole = StageSpan(0, space.model.shape.layers, True, True)

    def run(self, shapes: Iterator[Layout]) -> None:
        """Until nothing that waits can be among the best."""
        for shape in shapes:
            self._shape(shape)
        while self._entries and not self._is_over():
            heapq.heappop(self._entries).open()
        self.counts["slower"] += sum(entry.layouts for entry in self._entries)
        self._entries.clear()

    def _push(self, bound_s: float, layouts: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._entries, _Entry(bound_s, next(self._numbers), layouts, what))

    def _is_over(self) -> bool:
        last = self.found[self.top - 1][0][0] if len(self.found) >= self.top else math.inf
        return _rounded(self._entries[0].bound_s) > last

    def _shape(self, shape: Layout) -> None:
        """Bounded by the mean work of all pipeline ranks, of which the slowest does no less."""
        layouts, shards = self.space.count(shape), self.space.shards(shape)
        if not layouts:
            return
        least = replace(shape, shard=shards[-1])
        needed = states_bytes(self.space.model, least)
        if needed > self._room:
            self._leave(layouts, needed, least)
            return
        microbatches = shape.microbatches(self.space.global_batch)
        bound_s = microbatches * self._work_s(shape.tp, shape.micro_batch) / shape.pp
        self._push(bound_s, layouts, partial(self._flavours, shape, layouts))

    def _work_s(self, tp: int, micro_batch: int) -> float:
        """Of a microbatch through the whole model, without messages, whatever else is chosen."""
        if (tp, micro_batch) not in self._works:
            alone = self.space.flavours(Layout(tp=tp, micro_batch=micro_batch))
            all_of_it = [self._step(flavour).of_span(self._whole) for flavour in alone]
            self._works[tp, micro_batch] = min(one.forward.compute_s + one.backward.compute_s for one in all_of_it)
        return self._works[tp, micro_batch]

    def _flavours(self, shape: Layout, layouts: int) -> None:
        """And by the messages over tp."""
        flavours = list(self.space.flavours(shape))
        for flavour in flavours:
            step = self._step(flavour)
            one = step.of_span(self._whole)
            bound_s = step.microbatches * (one.forward.total_s + one.backward.total_s) / shape.pp
            self._push(bound_s, layouts // len(flavours), partial(self._schedules, step))

    def _schedules(self, flavour: Step) -> None:
        """And by the longest chain of work and messages over stages."""
        shards = self.space.shards(flavour.layout)
        halved = self._step(replace(flavour.layout, schedule=HALVED[0])).known
        for schedule, chunks in self.space.schedules(flavour.layout):
            known = halved if schedule in HALVED else flavour.known
            step = self._step(replace(flavour.layout, schedule=schedule, chunks=chunks), known)
            ends = _ends(step)
            self._push(max(ends), len(shards), partial(self._shards, step, shards, ends))

    def _shards(self, scheduled: Step, shards: Sequence[Shard], ends: Sequence[float]) -> None:
        """And by what each rank does after that."""
        for shard in shards:
            leaf = replace(scheduled.layout, shard=shard)
            self._leaf(self._step(leaf, scheduled.known), ends)

    def _leaf(self, step: Step, ends: Sequence[float]) -> None:
        needed = least_bytes(step.model, step.layout, step.global_batch)
        if needed > self._room:
            self._with_less(step, needed)
            return
        bound_s = max(rank.step_s(end_s) for end_s, rank in zip(ends, step.ranks, strict=True))
        self._push(bound_s, 1, partial(self._try, step))

    def _try(self, step: Step) -> None:
        needed = max(stage.device_bytes for stage in step.memory)
        if needed > self._room:
            self._with_less(step, needed)
        else:
            self._predict(step)

    def _with_less(self, step: Step, needed: float) -> None:
        """A layout that does not fit: what makes more again may."""
        less = self.space.with_less_memory(step.layout)
        if less is None:
            self._leave(1, needed, step.layout)
            return
        again = self._step(less)
        self._leaf(again, _ends(again))

    def _predict(self, step: Step) -> None:
        try:
            check_fit(step.model, step.layout, step.global_batch)
        except UserError as error:
            self.counts["refused"] += 1
            self.refused[str(error)] += 1
            return
        self.counts["predicted"] += 1
        predicted = step.predict()
        bisect.insort(self.found, (_order(predicted), predicted), key=lambda pair: pair[0])

    def _step(self, layout: Layout, known: Known | None = None) -> Step:
        if known is None:
            known = Known(self._passes.setdefault(_what_passes_need(layout, self.space.machine), {}))
        return Step(self.space.machine, self.space.model, layout, self.space.global_batch, known)

    def _leave(self, layouts: int, needed: float, layout: Layout) -> None:
        """They do not fit; `layout` is the one of them that lacks least, as far as is known."""
        self.counts["does not fit"] += layouts
        if self.nearest is None or needed < self.nearest[0]:
            self.nearest = needed, layout

    @property
    def _room(self) -> float:
        return (1 - HEADROOM) * self.space.machine.device.usable_bytes

    def result(self) -> Search:
        nearest = self._step(self.nearest[1]).predict() if self.nearest and not self.found else None
        return Search(
            machine=self.space.machine,
            model=self.space.model,
            devices=self.space.devices,
            global_batch=self.space.global_batch,
            constraints=self.space.constraints,
            best=tuple(predicted for _, predicted in self.found[: self.top]),
            counts=dict(self.counts),
            refused=dict(self.refused),
            nearest=nearest,
            headroom=HEADROOM,
        )


def _ends(step: Step) -> list[float]:
    return ends_at_least(step.layout.schedule, step.placement, step.microbatches, step.times)


def _what_passes_need(layout: Layout, machine: Machine) -> Layout:
    """Layouts whose passes take the same are equal in this: where tp ranks share a node, nothing else moves them."""
    alike = replace(layout, schedule=HALVED[0] if layout.schedule in HALVED else "1f1b", chunks=1, shard="none")
    apart = layout.tp > machine.device.per_node or not layout.order.startswith("tp")
    return alike if apart else replace(alike, dp=1, pp=1, order=Layout.order)


def _rounded(seconds: float) -> float:
    """To 4 digits: closer ones count as equal."""
    return float(f"{seconds:.3e}")


def _order(predicted: Prediction) -> tuple[float, ...]:
    """The fastest first; of equals the simplest, with fewer stages, chunks, recomputation, shards and codecs."""
    layout = predicted.layout
    simple = (layout.pp, layout.chunks, RECOMPUTE.index(layout.recompute), SHARDS.index(layout.shard), layout.tp)
    extra = (layout.policy != "none", layout.order != Layout.order, layout.sequence_parallel, layout.micro_batch)
    return (_rounded(predicted.iteration_time_s), *simple, *extra)
