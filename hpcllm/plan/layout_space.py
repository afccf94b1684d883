"""List the layouts of our trainer for so many devices, before anything is timed; and parse constraints on them.

    shape       tp, pp, dp, micro_batch       dp x pp x tp = devices, or fewer where none divides; samples divide, too
    flavour     precision, sequence parallelism, codecs, order of ranks      decide the passes of a microbatch
    leaf        schedule with chunks, shard
    recompute   none, selective, full: more only where less does not fit, for it only adds work

A value is tried where it can matter: no schedule but 1f1b without stages, no codecs without messages.

Constraints:    tp<=8,pp=4,recompute=none|selective,micro_batch=1|2,precision=bf16
                key relation value     = and != take several values with | between them; <, <=, >, >= are for numbers

Keys are those of a layout that a search chooses. A value that its usual choices do not have, such as micro_batch=24, is
one of the choices then. Pure.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpcllm.config.names import nearest
from hpcllm.errors import ConfigError
from hpcllm.pipeline.schedules import MOST_PASSES
from hpcllm.plan.layouts import Layout, Recompute, Schedule, Shard, layout_types, parse_pairs
from hpcllm.plan.machine import Machine
from hpcllm.plan.memory.predict import SHARDS
from hpcllm.plan.models import Model

MOST_NODES = 4  # over which tp ranks of one stage of a replica spread
MOST_SAMPLES = 64  # in a microbatch; kernels are long enough by then
CHUNKS = (2, 3, 4, 6, 8)  # tried with the interleaved schedule
RECOMPUTE = ("none", "selective", "full")
# mesh and microbatch, schedule, recomputation and sharding; flavour of the passes
CHOSEN = (
    *("tp", "pp", "dp", "micro_batch", "chunks", "schedule", "recompute", "shard"),
    *("sequence_parallel", "precision", "policy", "order"),
)
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
RELATIONS = ("<=", ">=", "!=", "<", ">", "=")


@dataclass(frozen=True)
class Constraint:
    """One condition on a key. Raises ConfigError for a key that is not chosen, or a value that no layout has."""

    key: str
    relation: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.key not in CHOSEN:
            raise ConfigError(f"--constraints: a search does not choose {self.key!r}; {nearest(self.key, CHOSEN)}")
        if self.relation in COMPARISONS and layout_types()[self.key] is not int:
            raise ConfigError(f"--constraints: {self.text}: {self.key} is not a number; valid: = and !=")
        if self.relation in COMPARISONS and len(self.values) > 1:
            raise ConfigError(f"--constraints: {self.text}: several values go with = and != only")
        for value in self.values:
            Layout(**{self.key: value})

    @property
    def text(self) -> str:
        return f"{self.key}{self.relation}{'|'.join(map(str, self.values))}"

    def allows(self, value: Any) -> bool:
        if self.relation in COMPARISONS:
            return COMPARISONS[self.relation](value, self.values[0])
        return (value in self.values) == (self.relation == "=")


@dataclass(frozen=True)
class Constraints:
    """Conditions that all hold."""

    all: tuple[Constraint, ...] = ()

    def allow(self, key: str, value: Any) -> bool:
        return all(one.allows(value) for one in self.all if one.key == key)

    def choices(self, key: str, usual: Iterable[Any]) -> list[Any]:
        """List the values of a key to try: those that constraints name, or the usual ones; as far as all allow them."""
        named = [value for one in self.all if one.key == key and one.relation == "=" for value in one.values]
        return [value for value in dict.fromkeys(named or usual) if self.allow(key, value)]

    def with_values(self, **values: Sequence[Any]) -> Constraints:
        """Add a choice of values for each of these keys for which no constraint names any."""
        named = {one.key for one in self.all if one.relation == "="}
        more = (Constraint(key, "=", tuple(choices)) for key, choices in values.items() if key not in named)
        return Constraints((*self.all, *more))


def parse_constraints(texts: str | Sequence[str]) -> Constraints:
    """Parse one or several lines. Raises ConfigError."""
    lines = [texts] if isinstance(texts, str) else texts
    parts = [part for line in lines for part in re.split(r",(?=[^,=<>!]*[=<>!])", line)]
    return Constraints(tuple(_parsed(part.strip()) for part in parts))


def _parsed(part: str) -> Constraint:
    relation = next((each for each in RELATIONS if each in part), "")
    key, _, words = part.partition(relation) if relation else (part, "", "")
    if not (key.strip() and words.strip()):
        form = "key=value or key<=number, for example tp<=8,pp=4,recompute=none|selective"
        raise ConfigError(f"--constraints: {part!r} should read {form}")
    values = [parse_pairs("constraints", f"{key.strip()}={word}")[key.strip()] for word in words.split("|")]
    return Constraint(key.strip(), relation, tuple(values))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Layouts to try; constraints narrow them, or name others."""

    machine: Machine
    model: Model
    devices: int
    global_batch: int
    constraints: Constraints

    def shapes(self, fewer: bool = False) -> Iterator[Layout]:
        """Yield tp, pp, dp and micro_batch. fewer: of less devices than all."""
        for tp, pp, dp in self._meshes_of_fewer() if fewer else self._meshes():
            samples = self.global_batch // dp
            usual = [n for n in range(1, min(samples, MOST_SAMPLES) + 1) if samples % n == 0]
            for micro_batch in self.constraints.choices("micro_batch", usual):
                if samples % micro_batch == 0 and samples // micro_batch * pp <= MOST_PASSES:
                    yield Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch)

    def flavours(self, shape: Layout) -> Iterator[Layout]:
        """Yield the shape with all that decides how long passes and messages take."""
        choices = self._flavours(shape)
        for values in itertools.product(*choices.values()):
            yield replace(shape, **dict(zip(choices, values, strict=True)))

    def count(self, shape: Layout) -> int:
        """Count the layouts of this shape, recomputation left open."""
        flavours = math.prod(len(values) for values in self._flavours(shape).values())
        return flavours * len(self.shards(shape)) * sum(1 for _ in self.schedules(shape))

    def _flavours(self, shape: Layout) -> dict[str, list[Any]]:
        is_cut = shape.tp > 1 and self.model.sequence % shape.tp == 0
        orders = ["tp,dp,pp"]
        if shape.dp > 1 and shape.pp > 1 and shape.tp < self.machine.device.per_node < shape.devices:
            orders.append("tp,pp,dp")
        device = self.machine.device
        precision = "fp32" if device.family == "cpu" else "bf16" if device.has_bf16 else "fp16"
        usual: dict[str, list[Any]] = {
            "precision": [precision],
            "sequence_parallel": [True, False] if is_cut else [False],
            "policy": ["none", "hpcllm"] if shape.devices > 1 else ["none"],
            "order": orders,
        }
        chosen = {key: self.constraints.choices(key, values) for key, values in usual.items()}
        return chosen | {"recompute": self.recompute[:1]}

    def shards(self, shape: Layout) -> list[Shard]:
        """List what replicas may share, from the least to the most."""
        usual = ["none"] if shape.dp == 1 else ["none", "states", "states+gradients"]
        if shape.dp > 1 and shape.pp == 1:
            usual.append("all")
        chosen = sorted(self.constraints.choices("shard", usual), key=SHARDS.index)
        return [shard for shard in chosen if shard != "all" or shape.pp == 1]  # as the trainer has it

    def schedules(self, shape: Layout) -> Iterator[tuple[Schedule, int]]:
        """Yield schedules with chunks; interleaved only if microbatches fill the pipeline: else it waits like 1f1b."""
        microbatches, layers = shape.microbatches(self.global_batch), self.model.shape.layers
        names = ["1f1b"] if shape.pp == 1 else ["1f1b", "zb-h1", "zb-v", "gpipe"]
        names += ["interleaved"] if 1 < shape.pp <= microbatches else []
        for schedule in self.constraints.choices("schedule", names):
            usual = {"zb-v": (2,), "interleaved": CHUNKS}.get(schedule, (1,))
            for chunks in self.constraints.choices("chunks", usual):
                fits = shape.pp * chunks <= layers and shape.pp * chunks * microbatches <= MOST_PASSES
                if fits and (chunks in usual or schedule == "interleaved"):
                    yield schedule, chunks

    @cached_property
    def recompute(self) -> list[Recompute]:
        """Levels of recomputation, from the least work to the least memory."""
        return sorted(self.constraints.choices("recompute", RECOMPUTE), key=RECOMPUTE.index)

    def with_less_memory(self, leaf: Layout) -> Layout | None:
        """Return the layout with more recomputation; None if there is no more."""
        later = self.recompute[self.recompute.index(leaf.recompute) + 1 :]
        return replace(leaf, recompute=later[0]) if later else None

    def _tensor(self) -> list[int]:
        """List tp such that its ranks share a node, or fill nodes, and divide what they split."""
        node, split = self.machine.device.per_node, self.model.most_tp
        most = min(split, self.devices, self.model.shape.vocabulary, MOST_NODES * node)
        usual = [tp for tp in range(1, most + 1) if split % tp == 0 and (node % tp == 0 or tp % node == 0)]
        return [tp for tp in self.constraints.choices("tp", usual) if split % tp == 0 and tp <= self.devices]

    def _meshes(self) -> Iterator[tuple[int, int, int]]:
        for tp in self._tensor():
            for pp in self.constraints.choices("pp", range(1, self._most_stages(tp) + 1)):
                dp, rest = divmod(self.devices, tp * pp)
                if not rest and self.global_batch % dp == 0 and self.constraints.allow("dp", dp):
                    yield tp, pp, dp

    def _meshes_of_fewer(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each tp and dp the most stages that devices suffice for, and the fewest that are no fuller."""
        for tp in self._tensor():
            for dp in self.constraints.choices("dp", self._divisors):
                most = min(self._most_stages(tp), self.devices // (tp * dp))
                if most and self.global_batch % dp == 0:
                    alike = -(-self.model.shape.layers // -(-self.model.shape.layers // most))
                    for pp in self.constraints.choices("pp", dict.fromkeys((most, alike))):
                        if pp <= most:
                            yield tp, pp, dp

    def _most_stages(self, tp: int) -> int:
        return min(self.model.shape.layers, self.devices // tp)

    @cached_property
    def _divisors(self) -> list[int]:
        """Divisors of the number of samples, the largest first."""
        low = [n for n in range(1, math.isqrt(self.global_batch) + 1) if self.global_batch % n == 0]
        return sorted({*low, *(self.global_batch // n for n in low)}, reverse=True)
