"""Search the fastest layouts of our trainer for a model on so many devices: best first, by lower bounds.

    shapes     tp, pp, dp, micro_batch     the mean work of all ranks
    flavours   + precision, codecs, ...    + messages over tp
    schedules  + schedule, chunks          the longest chain of work and messages over stages (timeline.earliest_ends)
    leaves     + shard, recompute          + exchange over dp, optimizer         does it fit? --> Prediction

All wait in one queue, the least bound first. The first one is taken out and refined: a shape into its flavours, these
into schedules, these into leaves; a leaf that does not fit into one that recomputes more, one that fits into a
prediction. As no layout is faster than its bound, the search is over when as many as requested are predicted that are
faster than whatever waits: nothing in the queue can be among them.

Of what layouts have in common, each is worked out once, and kept by the keys of a layout that it depends on:

    traffic    dp, pp, tp, order, precision, policy                            seconds by collective or path, and bytes
    passes     tp, micro_batch, recompute, ..., and only apart: dp, pp, order  by kind of stage
    StepCache  all of these                                                    bounds and runs by schedule and chunks

Does it fit? A bound of all ranks, one of the first rank, the ranks at both ends without messages, then all of them:
each costs more than the one before, and rejects most of what is left. Pure.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError, UserError
from hpcllm.plan.layout_space import RECOMPUTE, Constraints, Space, parse_constraints
from hpcllm.plan.layouts import Layout, Shard
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.memory.predict import SHARDS, end_ranks_bound, first_rank_bound, lower_bound, states_lower_bound
from hpcllm.plan.models import HALVED, Model, StageKind, read_model
from hpcllm.plan.prediction import Prediction, Step, StepCache
from hpcllm.plan.run_config import check_fit
from hpcllm.plan.time.network import Traffic
from hpcllm.plan.time.passes import Passes

Key = tuple[Any, ...]
# keys that a search chooses and that decide what passes do, beside the halves of HALVED
_decides_traffic = operator.attrgetter("dp", "pp", "tp", "order", "precision", "policy")
_of_passes = operator.attrgetter("tp", "micro_batch", "recompute", "sequence_parallel", "precision", "policy")
HEADROOM = 0.1  # share of usable memory that stays free: error of its prediction, fragments, other libraries
MOST_DEVICES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Search:
    """Result of a search: the best layouts first, and what became of the rest."""

    machine: Machine
    model: Model
    devices: int
    global_batch: int
    constraints: Constraints
    best: tuple[Prediction, ...]
    counts: Mapping[str, int]  # layouts: predicted, does not fit, refused, slower (not looked at in full)
    rejected: Mapping[str, int]  # message of the trainer -> layouts
    nearest: Prediction | None  # if nothing fits: the one that lacks least memory

    @property
    def idle(self) -> int:
        """Number of devices that the best layout leaves idle, because no layout with all of them exists or fits."""
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
    """Find the `top` fastest layouts that fit, each accepted by our trainer. Raises ConfigError."""
    limits = (("devices", devices, MOST_DEVICES), ("global_batch", global_batch, 1 << 40), ("top", top, 1000))
    for key, value, most in limits:
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{key} = {value!r}; valid: a whole number from 1 to {most}")
    space = Space(
        machine=read_machine(machine),
        model=read_model(model, sequence),
        devices=devices,
        global_batch=global_batch,
        constraints=constraints if isinstance(constraints, Constraints) else parse_constraints(constraints),
    )
    state = _State(space, top)
    _run(state, space.shapes())
    if not state.found:
        _run(state, space.shapes(fewer=True))
    return state.result()


@dataclass(frozen=True)
class _Entry:
    """Layouts that wait to be refined."""

    bound_s: float  # no step of these layouts is shorter
    layouts: int  # number of them
    refine: Callable[[], Iterable[_Entry]]


def _run(state: _State, shapes: Iterator[Layout]) -> None:
    """Take the entry with the least bound and refine it, until nothing that waits can be among the best."""
    queue: list[tuple[float, int, _Entry]] = []  # among equal bounds the earliest entry comes first
    number = 0
    entries: Iterable[_Entry] = itertools.chain.from_iterable(map(state.shape, shapes))
    while True:
        for entry in entries:
            heapq.heappush(queue, (entry.bound_s, number, entry))
            number += 1
        if not queue or state.is_over(queue[0][0]):
            break
        entries = heapq.heappop(queue)[2].refine()
    state.counts["slower"] += sum(entry.layouts for *_, entry in queue)


class _State:
    """Findings of a search so far, and times that its entries share."""

    def __init__(self, space: Space, top: int) -> None:
        self.space, self.top = space, top
        self.room = (1 - HEADROOM) * space.machine.device.usable_bytes
        self.whole_model: StageKind = (space.model.shape.layers, True, True)
        self.found: list[tuple[tuple[float, ...], Prediction]] = []  # sorted
        self.counts: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.nearest: tuple[float, Layout] | None = None  # bytes needed
        self._passes: defaultdict[Key, dict[StageKind, Passes]] = defaultdict(dict)
        self._traffic: defaultdict[Key, dict[Traffic, float]] = defaultdict(dict)
        self._caches: dict[Key, StepCache] = {}
        self._work_s: dict[tuple[int, int], float] = {}

    def is_over(self, bound_s: float) -> bool:
        """Return True if a layout of this bound cannot be among the best."""
        last = self.found[self.top - 1][0][0] if len(self.found) >= self.top else math.inf
        return _rounded(bound_s) > last

    def shape(self, shape: Layout) -> Iterator[_Entry]:
        """Bound a shape by the mean work of all pipeline ranks, unless it cannot fit, or constraints leave nothing."""
        layouts, shards = self.space.count(shape), self.space.shards(shape)
        if not layouts:
            return
        smallest = replace(shape, shard=shards[-1])
        needed = states_lower_bound(self.space.model, smallest)
        if needed > self.room:
            self._does_not_fit(layouts, needed, smallest)
            return
        microbatches = shape.microbatches(self.space.global_batch)
        bound_s = microbatches * self._least_work_s(shape) / shape.pp
        yield _Entry(bound_s, layouts, partial(self._flavours, shape, layouts))

    def _least_work_s(self, shape: Layout) -> float:
        """Return the seconds of a microbatch through the whole model, without messages, for the fastest flavour."""
        key = shape.tp, shape.micro_batch
        if key not in self._work_s:
            flavours = self.space.flavours(Layout(tp=shape.tp, micro_batch=shape.micro_batch))
            passes = [self.step(flavour).passes_of(self.whole_model) for flavour in flavours]
            self._work_s[key] = min(one.forward.compute_s + one.backward.compute_s for one in passes)
        return self._work_s[key]

    def _flavours(self, shape: Layout, layouts: int) -> Iterator[_Entry]:
        """Choose precision, codecs, order; count the messages over tp."""
        flavours = list(self.space.flavours(shape))
        for flavour in flavours:
            step = self.step(flavour)
            one = step.passes_of(self.whole_model)
            bound_s = step.microbatches * (one.forward.total_s + one.backward.total_s) / shape.pp
            yield _Entry(bound_s, layouts // len(flavours), partial(self._schedules, step))

    def _schedules(self, flavour: Step) -> Iterator[_Entry]:
        """Choose the schedule; count its longest chain of work and messages over stages."""
        layout, shards = flavour.layout, self.space.shards(flavour.layout)
        least = replace(layout, shard=shards[-1], recompute=self.space.recompute[-1])
        for schedule, chunks in self.space.schedules(layout):
            smallest = replace(least, schedule=schedule, chunks=chunks)
            needed = lower_bound(self.space.model, smallest, self.space.global_batch)
            if needed > self.room:
                self._does_not_fit(len(shards), needed, smallest)
                continue
            step = self.step(replace(layout, schedule=schedule, chunks=chunks))
            yield _Entry(max(step.earliest_ends), len(shards), partial(self._shards, step.layout, shards))

    def _shards(self, scheduled: Layout, shards: list[Shard]) -> Iterator[_Entry]:
        """Choose the shard; count what each rank does after its passes."""
        for shard in shards:
            yield from self._leaf(self.step(replace(scheduled, shard=shard)))

    def _leaf(self, step: Step) -> Iterable[_Entry]:
        """Bound one layout, or the next one that recomputes more and may fit; nothing if none may fit."""
        needed = lower_bound(step.model, step.layout, step.global_batch)
        if needed > self.room:
            return self._with_less_memory(step, needed)
        bound_s = max(rank.step_s(end_s) for end_s, rank in zip(step.earliest_ends, step.ranks, strict=True))
        return [_Entry(bound_s, 1, partial(self._predict, step))]

    def _with_less_memory(self, step: Step, needed: float) -> Iterable[_Entry]:
        """Recompute more than a layout that does not fit; nothing if that is impossible or does not help."""
        less = self.space.with_less_memory(step.layout)
        if less is None:
            self._does_not_fit(1, needed, step.layout)
            return []
        return self._leaf(self.step(less))

    def _predict(self, step: Step) -> Iterable[_Entry]:
        """Predict a layout if it fits and our trainer accepts it; if it does not fit, recompute more."""
        needed = self._needed(step)
        if needed > self.room:
            return self._with_less_memory(step, needed)
        try:
            check_fit(step.model, step.layout, step.global_batch)
        except UserError as error:
            self.counts["refused"] += 1
            self.rejected[str(error)] += 1
        else:
            self.counts["predicted"] += 1
            predicted = step.predict()
            bisect.insort(self.found, (_order(predicted), predicted), key=lambda pair: pair[0])
        return []

    def _needed(self, step: Step) -> float:
        """Return the bytes of the fullest rank; a bound of them suffices if that is too much and not the nearest."""
        needed = first_rank_bound(step.model, step.layout, step.global_batch)
        if needed > self.room:
            return needed
        least = end_ranks_bound(step.model, step.layout, step.global_batch)
        can_be_nearest = not self.found and (self.nearest is None or least < self.nearest[0])
        if least > self.room and not can_be_nearest:
            return least
        return max(stage.device_bytes for stage in step.memory)

    def step(self, layout: Layout) -> Step:
        """Make the step of a layout; what layouts have in common is worked out once."""
        key = _decides_times(layout)
        cache = self._caches.get(key)
        if cache is None:
            passes, traffic = _decides_passes(layout, self.space.machine), _decides_traffic(layout)
            cache = self._caches[key] = StepCache(self._passes[passes], self._traffic[traffic])
        return Step(self.space.machine, self.space.model, layout, self.space.global_batch, cache)

    def _does_not_fit(self, layouts: int, needed: float, layout: Layout) -> None:
        """Count layouts that do not fit; `layout` is the one of them that lacks least, as far as is known."""
        self.counts["does not fit"] += layouts
        if self.nearest is None or needed < self.nearest[0]:
            self.nearest = needed, layout

    def result(self) -> Search:
        nearest = self.step(self.nearest[1]).predict() if self.nearest and not self.found else None
        return Search(
            machine=self.space.machine,
            model=self.space.model,
            devices=self.space.devices,
            global_batch=self.space.global_batch,
            constraints=self.space.constraints,
            best=tuple(predicted for _, predicted in self.found[: self.top]),
            counts=dict(self.counts),
            rejected=dict(self.rejected),
            nearest=nearest,
        )


def _decides_times(layout: Layout) -> Key:
    """Return all that the times of passes and messages may depend on, of the keys that a search chooses."""
    return layout.dp, layout.pp, layout.order, *_of_passes(layout), layout.schedule in HALVED


def _decides_passes(layout: Layout, machine: Machine) -> Key:
    """Return all that the times of passes depend on: where tp ranks share a node, no other axis."""
    apart = layout.tp > machine.device.per_node or not layout.order.startswith("tp")
    return _decides_times(layout)[0 if apart else 3 :]


def _rounded(seconds: float) -> float:
    """Round to 4 digits: closer times count as equal."""
    return float(f"{seconds:.3e}")


def _order(predicted: Prediction) -> tuple[float, ...]:
    """Sort the fastest first; of equals the simplest, with fewer stages, chunks, recomputation, shards and codecs."""
    layout = predicted.layout
    simple = (layout.pp, layout.chunks, RECOMPUTE.index(layout.recompute), SHARDS.index(layout.shard), layout.tp)
    extra = (layout.policy != "none", layout.order != Layout.order, layout.sequence_parallel, layout.micro_batch)
    return (_rounded(predicted.iteration_time_s), *simple, *extra)
