"""Predict a step of a layout of a model on a machine: time, memory, work.

    passes of a microbatch (time/passes.py) --> actions of the schedule (time/timeline.py) --> gradients, AdamW, weights
    tensors of each stage (memory/stage_memory.py) --> does it fit?

    step = compute + tp + pp + bubble + dp exposed + optimizer        of the rank that works longest

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcllm.model.shapes import StageSpan
from hpcllm.pipeline.actions import Placement
from hpcllm.plan.alike import Alike, alike
from hpcllm.plan.interval import interval_s
from hpcllm.plan.layouts import Layout, parse_step
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.memory.stage_memory import StageMemory, stage_memory
from hpcllm.plan.models import (
    Model,
    StageKind,
    held_parameters,
    placement_of,
    read_model,
    spans_like,
    stage_spans,
)
from hpcllm.plan.run_config import check_fit
from hpcllm.plan.time.network import Network, Traffic
from hpcllm.plan.time.passes import Passes, ends_s, exchange, hideable_s, optimizer_s, passes
from hpcllm.plan.time.timeline import StageTimes, earliest_ends, run
from hpcllm.plan.time.topology import Way

ROUNDING = 1e-9  # share of a step: rounding error of sums of many terms


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Time, memory and work of one optimizer step of a layout."""

    machine: Machine
    model: Model
    layout: Layout
    global_batch: int  # samples
    iteration_time_s: float
    compute_s: float
    tp_s: float
    pp_s: float  # messages between stages that nothing hides
    bubble_s: float
    dp_exposed_s: float
    dp_hidden_s: float
    optimizer_s: float
    memory: tuple[StageMemory, ...]  # one for each pipeline rank
    hardware_flops: float  # FLOPs of a step, with recomputation
    slowest: int  # the pipeline rank that ends last, whose times these are
    busiest: int  # the pipeline rank that works longest
    busier: float  # by what share of the mean of all ranks it works longer than that

    @property
    def fits(self) -> bool:
        """True if every rank's memory is enough."""
        return self.largest.device_bytes <= self.machine.device.usable_bytes

    @property
    def largest(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.device_bytes)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Seconds between which the step lies, by the errors of published runs."""
        return interval_s(self.iteration_time_s, self.layout.dp)

    @property
    def tokens_per_s(self) -> float:
        return self.global_batch * self.model.sequence / self.iteration_time_s

    @property
    def tflops_per_device_model(self) -> float:
        """TFLOP/s of the model's work alone, arXiv:2205.05198 appendix A."""
        flops = self.model.flops_per_token * self.global_batch * self.model.sequence
        return flops / self.iteration_time_s / self.layout.devices / 1e12

    @property
    def tflops_per_device_hardware(self) -> float:
        """TFLOP/s with recomputation, as arXiv:2104.04473 counts."""
        return self.hardware_flops / self.iteration_time_s / self.layout.devices / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops_per_device_model / self.machine.device.peak_bf16_tflops


def predict(
    machine: str | Path | Machine,
    model: str | Mapping[str, Any] | Model,
    layout: str | Mapping[str, Any] | Layout,
    global_batch: int | None = None,
    sequence: int | None = None,
) -> Prediction:
    """Predict one step of `global_batch` samples, which may be one of the keys of the layout.

    A layout given as text or mapping is one of another trainer, unless it says trainer=hpcllm. Raises ConfigError
    where machine, model or layout cannot be, or do not fit together.
    """
    machine, model = read_machine(machine), read_model(model, sequence)
    layout, global_batch = parse_step(layout, global_batch)
    check_fit(model, layout, global_batch)
    return Step(machine, model, layout, global_batch).predict()


@dataclass(frozen=True)
class StepCache:
    """Times shared by steps whose layouts differ in schedule, chunks and shard; halved schedules have their own."""

    passes: dict[StageKind, Passes] = field(default_factory=dict)
    traffic: dict[Traffic, float] = field(default_factory=dict)
    messages: dict[Way, float] = field(default_factory=dict)  # seconds by path
    bounds: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # by schedule and chunks
    runs: dict[tuple[str, int, bool], list[float]] = field(default_factory=dict)  # and with messages or without


@dataclass(frozen=True)
class Step:
    """One optimizer step; its parts are worked out as they are needed. Layout, model and batch fit together."""

    machine: Machine
    model: Model
    layout: Layout
    global_batch: int
    cache: StepCache = field(default_factory=StepCache, compare=False, repr=False)

    @cached_property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)

    @cached_property
    def network(self) -> Network:
        return Network(self.machine, self.layout, self.cache.traffic)

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.layout)

    @cached_property
    def spans(self) -> tuple[StageSpan, ...]:
        return stage_spans(self.model, self.layout)

    @cached_property
    def alike(self) -> Alike:
        return alike(self.model, self.layout, self.machine.device)

    @cached_property
    def passes(self) -> list[Passes]:
        """Times of a microbatch through each virtual stage."""
        each = [self.passes_of(one.kind) for one in self.alike.stages]
        return [each[place] for place in self.alike.of_stages]

    def passes_of(self, kind: StageKind) -> Passes:
        """Return the times of a microbatch through a stage of this kind."""
        cache = self.cache.passes
        if kind not in cache:
            (span,) = spans_like([kind])
            cache[kind] = passes(self.model, self.layout, span, self.machine, self.network)
        return cache[kind]

    @cached_property
    def times(self) -> list[StageTimes]:
        """Times of each virtual stage, with the messages between stages."""
        each = [
            _times(self.passes_of(one.kind), self._message_s(one.after), self._message_s(one.before))
            for one in self.alike.stages
        ]
        return [each[place] for place in self.alike.of_stages]

    @cached_property
    def ranks(self) -> list[RankTimes]:
        """Times of each pipeline rank besides its schedule."""
        each = [self._rank(kinds, [self.passes_of(kind) for kind in kinds]) for kinds in self.alike.ranks]
        return [each[place] for place in self.alike.of_ranks]

    @property
    def earliest_ends(self) -> list[float]:
        """Seconds before which no pipeline rank has done its passes."""
        layout, cache = self.layout, self.cache.bounds
        key = layout.schedule, layout.chunks
        if key not in cache:
            cache[key] = earliest_ends(layout.schedule, self.placement, self.microbatches, self.times)
        return cache[key]

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        return stage_memory(self.model, self.layout, self.global_batch, self.machine)

    def predict(self) -> Prediction:
        """Run the schedule without messages and with them."""
        without, with_messages = self._ends(with_messages=False), self._ends(with_messages=True)
        ends = [rank.step_s(end_s) for end_s, rank in zip(with_messages, self.ranks, strict=True)]
        last = max(range(len(ends)), key=ends.__getitem__)
        rank, end_s = self.ranks[last], with_messages[last]
        idle_s, hidden_s = without[last] - rank.compute_s - rank.tp_s, rank.hidden_s(end_s)
        work_s = [each.compute_s + each.tp_s for each in self.ranks]
        busiest = max(range(len(work_s)), key=work_s.__getitem__)
        return Prediction(
            machine=self.machine,
            model=self.model,
            layout=self.layout,
            global_batch=self.global_batch,
            iteration_time_s=ends[last],
            compute_s=rank.compute_s,
            tp_s=rank.tp_s,
            pp_s=max(0.0, end_s - without[last]),
            bubble_s=idle_s if idle_s > ROUNDING * ends[last] else 0.0,
            dp_exposed_s=rank.exchanged_s - hidden_s,
            dp_hidden_s=hidden_s,
            optimizer_s=rank.optimizer_s,
            memory=self.memory,
            hardware_flops=hardware_flops(self.model, self.layout) * self.global_batch * self.model.sequence,
            slowest=last,
            busiest=busiest,
            busier=work_s[busiest] * len(work_s) / sum(work_s) - 1.0,
        )

    def _ends(self, with_messages: bool) -> list[float]:
        """Run the schedule; return when each pipeline rank has done its passes."""
        layout, cache = self.layout, self.cache.runs
        key = layout.schedule, layout.chunks, with_messages
        if key not in cache:
            times = self.times if with_messages else [_times(one, 0.0, 0.0) for one in self.passes]
            blocking = layout.trainer != "hpcllm"
            cache[key] = run(layout.schedule, layout.pp, layout.chunks, self.microbatches, times, blocking)
        return cache[key]

    def _message_s(self, path: Way | None) -> float:
        """Return the seconds of a message of hidden states, or their gradients, between two pipeline ranks."""
        if path is None:
            return 0.0
        cache = self.cache.messages
        if path not in cache:
            size = message_bytes(self.model, self.layout)
            cache[path] = self.network.message_s(size, *self.alike.messages[path])
        return cache[path]

    def _rank(self, kinds: tuple[StageKind, ...], mine: list[Passes]) -> RankTimes:
        layout, microbatches = self.layout, self.microbatches
        parameters = held_parameters(self.model.shape, kinds, layout.tp)
        blocks = sum(blocks for blocks, _, _ in kinds)
        done = exchange(parameters, blocks, layout, microbatches, self.network)
        tp_s = microbatches * sum(one.forward.tp_s + one.backward.tp_s for one in mine)
        forward_s, backward_s = (sum(getattr(one, way).total_s for one in mine) for way in ("forward", "backward"))
        compute_s = microbatches * (forward_s + backward_s) - tp_s
        is_end = any(first for _, first, _ in kinds) != any(last for *_, last in kinds)
        exchanged_s = done.total_s + is_end * ends_s(self.model, layout, self.network)
        updated = parameters / (1 if layout.shard == "none" else layout.dp)
        held = updated if layout.shard == "all" else parameters
        optimizing_s = optimizer_s(held, updated, layout, self.machine)
        return RankTimes(compute_s, tp_s, exchanged_s, hideable_s(done, forward_s, backward_s), optimizing_s)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one pipeline rank in a step, besides waiting."""

    compute_s: float
    tp_s: float
    exchanged_s: float  # with its replicas
    hideable_s: float  # part of exchanged_s that its passes hide, if they take as long
    optimizer_s: float

    def hidden_s(self, end_s: float) -> float:
        """Return how much of the exchange is hidden by passes that end at end_s."""
        return min(end_s, self.hideable_s)

    def step_s(self, end_s: float) -> float:
        """Return the length of the step if its passes end at end_s: an earlier end is never a longer step."""
        return end_s + self.exchanged_s - self.hidden_s(end_s) + self.optimizer_s


def _times(one: Passes, send_forward_s: float, send_backward_s: float) -> StageTimes:
    return StageTimes(one.forward.total_s, one.backward.total_s, one.weight_s, send_forward_s, send_backward_s)


def message_bytes(model: Model, layout: Layout) -> float:
    """Return the bytes of one rank's message between stages: the hidden states, or the rank's part of the sequence."""
    size = layout.micro_batch * model.sequence * model.shape.hidden * layout.item_bytes
    return size / layout.tp if layout.sequence_parallel or layout.trainer == "megatron" else size


def hardware_flops(model: Model, layout: Layout) -> float:
    """Return the FLOPs a token of a forward and backward pass with recomputation, none of it in the output layer."""
    shape = model.shape
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * model.sequence
    recomputed = 0.0
    if layout.recompute == "full":
        recomputed = model.flops_per_token - 6.0 * shape.vocabulary * shape.hidden
    elif layout.recompute == "selective" and layout.trainer == "megatron":
        recomputed = attention
    return model.flops_per_token + recomputed / 3
