"""What a layout of a model on a machine takes: memory, time, work, energy.

    passes of a microbatch (passes.py) --> actions of the schedule (timeline.py) --> gradients, AdamW, weights --> step
    tensors of each stage (stage_memory.py) --> does it fit?

    step = compute + tp + pp + bubble + dp exposed + optimizer        of the rank that works longest

Pure: imports neither torch nor mpi4py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcllm.model.shapes import StageSpan
from hpcllm.pipeline.placement import Placement
from hpcllm.plan.fitting import check_fit
from hpcllm.plan.layouts import Layout, parse_step
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.memory.stage_memory import StageMemory, stage_memory
from hpcllm.plan.models import Model, read_model
from hpcllm.plan.network.network import Network
from hpcllm.plan.network.topology import Way
from hpcllm.plan.stages import Alike, alike, held_parameters, homes_of, placement_of, stage_spans
from hpcllm.plan.time.data_parallel import ends_s, exchange, hideable_s
from hpcllm.plan.time.passes import Passes, optimizer_s, passes
from hpcllm.plan.time.timeline import Finish, StageTimes, run

ROUNDING = 1e-9  # of a step: what sums of many terms are wrong by


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One optimizer step of a layout."""

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
    memory: tuple[StageMemory, ...]  # of each pipeline rank
    hardware_flops: float  # of a step, with what is made again
    slowest: int  # the pipeline rank that ends last, whose times these are

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is enough."""
        return self.largest.device_bytes <= self.machine.device.usable_bytes

    @property
    def largest(self) -> StageMemory:
        return max(self.memory, key=lambda stage: stage.device_bytes)

    @property
    def memory_gb_per_stage(self) -> tuple[dict[str, float], ...]:
        """Of each pipeline rank: allocated between two steps, at its peak in one, and more; GB of 1e9 bytes."""
        return tuple(stage.as_gb() for stage in self.memory)

    @property
    def tokens_per_s(self) -> float:
        return self.global_batch * self.model.sequence / self.iteration_time_s

    @property
    def tflops_per_device_model(self) -> float:
        """Work of the model alone, arXiv:2205.05198 appendix A."""
        flops = self.model.flops_per_token * self.global_batch * self.model.sequence
        return flops / self.iteration_time_s / self.layout.devices / 1e12

    @property
    def tflops_per_device_hardware(self) -> float:
        """With what recomputation makes again, as arXiv:2104.04473 counts."""
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
    """One step of `global_batch` samples, which may stand among the keys of the layout, too.

    A layout given as text or mapping is one of another trainer, unless it says trainer=hpcllm. Raises ConfigError
    where machine, model or layout cannot be, or do not fit together.
    """
    machine, model = read_machine(machine), read_model(model, sequence)
    layout, global_batch = parse_step(layout, global_batch)
    check_fit(model, layout, global_batch)
    return Step(machine, model, layout, global_batch).predict()


@dataclass(frozen=True)
class Known:
    """What steps share whose layouts differ only in schedule, chunks and shard; but halved schedules their own."""

    passes: dict[Alike, Passes] = field(default_factory=dict)
    times: dict[tuple[Alike, float, float], StageTimes] = field(default_factory=dict)
    messages: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds from one pipeline rank to another
    ways: dict[Way, float] = field(default_factory=dict)  # the same, by where they lie


@dataclass(frozen=True)
class Step:
    """What is known before its schedule is run. Layout, model and batch fit together."""

    machine: Machine
    model: Model
    layout: Layout
    global_batch: int
    known: Known = field(default_factory=Known, compare=False, repr=False)

    @cached_property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)

    @cached_property
    def network(self) -> Network:
        return Network(self.machine, self.layout)

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.layout)

    @cached_property
    def spans(self) -> tuple[StageSpan, ...]:
        return stage_spans(self.model, self.layout)

    @cached_property
    def passes(self) -> list[Passes]:
        """Of each virtual stage."""
        return [self.of_span(span) for span in self.spans]

    def of_span(self, span: StageSpan) -> Passes:
        kind, known = alike(span), self.known.passes
        if kind not in known:
            known[kind] = passes(self.model, self.layout, span, self.machine, self.network)
        return known[kind]

    @cached_property
    def times(self) -> list[StageTimes]:
        """With the messages between stages."""
        homes = homes_of(self.placement)
        around = zip(self.spans, homes, (*homes[1:], homes[-1]), (homes[0], *homes[:-1]), strict=True)
        return [
            self._times(span, self._message_s(here, after), self._message_s(here, before))
            for span, here, after, before in around
        ]

    def _times(self, span: StageSpan, send_forward_s: float, send_backward_s: float) -> StageTimes:
        key, known = (alike(span), send_forward_s, send_backward_s), self.known.times
        if key not in known:
            known[key] = _times(self.of_span(span), send_forward_s, send_backward_s)
        return known[key]

    @cached_property
    def ranks(self) -> list[RankTimes]:
        """What each pipeline rank does besides its schedule."""
        found: dict[tuple[Alike, ...], RankTimes] = {}
        every = []
        for rank in range(self.layout.pp):
            stages = [self.placement.stage(rank, chunk) for chunk in range(self.placement.chunks)]
            kinds = tuple(alike(self.spans[stage]) for stage in stages)
            if kinds not in found:
                found[kinds] = self._rank(kinds, [self.passes[stage] for stage in stages])
            every.append(found[kinds])
        return every

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        return stage_memory(self.model, self.layout, self.global_batch, self.machine)

    def predict(self) -> Prediction:
        silent = self._run([_times(one, 0.0, 0.0) for one in self.passes])
        heard = self._run(self.times)
        return self._summed_up(silent, heard)

    def _run(self, times: list[StageTimes]) -> Finish:
        layout = self.layout
        return run(layout.schedule, layout.pp, layout.chunks, self.microbatches, times, layout.trainer != "hpcllm")

    def _message_s(self, source: int, target: int) -> float:
        """Of hidden states or their gradients, from one pipeline rank to another."""
        known = self.known.messages
        if (source, target) not in known:
            known[source, target] = self._sent_s(source, target) if source != target else 0.0
        return known[source, target]

    def _sent_s(self, source: int, target: int) -> float:
        known, way = self.known.ways, self.network.way(source, target)
        if way not in known:
            known[way] = self.network.message_s(message_bytes(self.model, self.layout), source, target)
        return known[way]

    def _rank(self, kinds: tuple[Alike, ...], mine: list[Passes]) -> RankTimes:
        layout, microbatches = self.layout, self.microbatches
        parameters = held_parameters(self.model.shape, kinds, layout.tp)
        done = exchange(parameters, layout, microbatches, self.network)
        tp_s = microbatches * sum(one.forward.tp_s + one.backward.tp_s for one in mine)
        forward_s, backward_s = (sum(getattr(one, way).total_s for one in mine) for way in ("forward", "backward"))
        compute_s = microbatches * (forward_s + backward_s) - tp_s
        is_end = any(first for _, first, _ in kinds) != any(last for *_, last in kinds)
        exchanged_s = done.total_s + is_end * ends_s(self.model, layout, self.network)
        updated = parameters / (1 if layout.shard == "none" else layout.dp)
        held = updated if layout.shard == "all" else parameters
        optimizing_s = optimizer_s(held, updated, layout, self.machine)
        return RankTimes(compute_s, tp_s, exchanged_s, hideable_s(done, forward_s, backward_s), optimizing_s)

    def _summed_up(self, silent: Finish, heard: Finish) -> Prediction:
        ends = [rank.step_s(end_s) for end_s, rank in zip(heard.end_s, self.ranks, strict=True)]
        last = max(range(len(ends)), key=ends.__getitem__)
        rank = self.ranks[last]
        idle_s = silent.end_s[last] - rank.compute_s - rank.tp_s
        return Prediction(
            machine=self.machine,
            model=self.model,
            layout=self.layout,
            global_batch=self.global_batch,
            iteration_time_s=ends[last],
            compute_s=rank.compute_s,
            tp_s=rank.tp_s,
            pp_s=max(0.0, heard.end_s[last] - silent.end_s[last]),
            bubble_s=idle_s if idle_s > ROUNDING * ends[last] else 0.0,
            dp_exposed_s=rank.exchanged_s - rank.hidden_s(heard.end_s[last]),
            dp_hidden_s=rank.hidden_s(heard.end_s[last]),
            optimizer_s=rank.optimizer_s,
            memory=self.memory,
            hardware_flops=hardware_flops(self.model, self.layout) * self.global_batch * self.model.sequence,
            slowest=last,
        )


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one pipeline rank in a step."""

    compute_s: float
    tp_s: float
    exchanged_s: float  # with its replicas
    hideable_s: float  # of that, if its passes take as long
    optimizer_s: float

    def hidden_s(self, end_s: float) -> float:
        """Of the exchange, by passes that end then."""
        return min(end_s, self.hideable_s)

    def step_s(self, end_s: float) -> float:
        """All of its step, if its passes end then: an earlier end is never a longer step."""
        return end_s + self.exchanged_s - self.hidden_s(end_s) + self.optimizer_s


def _times(one: Passes, send_forward_s: float, send_backward_s: float) -> StageTimes:
    return StageTimes(one.forward.total_s, one.backward.total_s, one.weight_s, send_forward_s, send_backward_s)


def message_bytes(model: Model, layout: Layout) -> float:
    """Of one rank's message between stages: all tp ranks have the hidden states, or a part of the sequence each."""
    size = layout.micro_batch * model.sequence * model.shape.hidden * layout.item_bytes
    return size / layout.tp if layout.sequence_parallel or layout.trainer == "megatron" else size


def hardware_flops(model: Model, layout: Layout) -> float:
    """FLOPs a token of one forward and backward pass with what is made again, nothing of it in the output layer."""
    shape = model.shape
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * model.sequence
    again = 0.0
    if layout.recompute == "full":
        again = model.flops_per_token - 6.0 * shape.vocabulary * shape.hidden
    elif layout.recompute == "selective" and layout.trainer == "megatron":
        again = attention
    return model.flops_per_token + again / 3
