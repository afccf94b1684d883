"""What a search may propose: `tp<=8,pp=4,recompute=none|selective,micro_batch=1|2,precision=bf16`.

    key relation value     = and != take several values with | between them; <, <=, >, >= are for numbers

Keys are those of a layout that a search chooses. A value that its usual choices do not have, such as micro_batch=24, is
one of the choices then. Pure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcllm.errors import ConfigError
from hpcllm.plan.layouts import Layout, layout_types, parse_pairs
from hpcllm.rules import nearest

# how many devices an axis has, how a microbatch goes through, what is kept, what travels
CHOSEN = (
    *("tp", "pp", "dp", "micro_batch", "chunks", "schedule", "recompute", "shard"),
    *("sequence_parallel", "precision", "policy", "order"),
)
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
RELATIONS = ("<=", ">=", "!=", "<", ">", "=")
FORM = "tp<=8,pp=4,recompute=none|selective"


@dataclass(frozen=True)
class Constraint:
    """Raises ConfigError for a key that is not chosen, or a value that no layout has."""

    key: str
    relation: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.key not in CHOSEN:
            raise ConfigError(f"--constraints: a search does not choose {self.key!r}; {nearest(self.key, CHOSEN)}")
        if self.relation in BOUNDS and layout_types()[self.key] is not int:
            raise ConfigError(f"--constraints: {self.text}: {self.key} is not a number; valid: = and !=")
        if self.relation in BOUNDS and len(self.values) > 1:
            raise ConfigError(f"--constraints: {self.text}: several values go with = and != only")
        for value in self.values:
            Layout(**{self.key: value})

    @property
    def text(self) -> str:
        return f"{self.key}{self.relation}{'|'.join(map(str, self.values))}"

    def allows(self, value: Any) -> bool:
        if self.relation in BOUNDS:
            return BOUNDS[self.relation](value, self.values[0])
        return (value in self.values) == (self.relation == "=")


@dataclass(frozen=True)
class Constraints:
    """All of them hold."""

    all: tuple[Constraint, ...] = ()

    def allow(self, key: str, value: Any) -> bool:
        return all(one.allows(value) for one in self.all if one.key == key)

    def choices(self, key: str, usual: Iterable[Any]) -> list[Any]:
        """The values of a key to try: those that a constraint names, or the usual ones; as far as all allow them."""
        named = [value for one in self.all if one.key == key and one.relation == "=" for value in one.values]
        return [value for value in dict.fromkeys(named or usual) if self.allow(key, value)]

    def with_values(self, **values: Sequence[Any]) -> Constraints:
        """And one of these values for each of these keys, where no constraint names any."""
        named = {one.key for one in self.all if one.relation == "="}
        more = (Constraint(key, "=", tuple(choices)) for key, choices in values.items() if key not in named)
        return Constraints((*self.all, *more))


def parse_constraints(texts: str | Sequence[str]) -> Constraints:
    """From one or several lines. Raises ConfigError."""
    lines = [texts] if isinstance(texts, str) else texts
    parts = [part for line in lines for part in re.split(r",(?=[^,=<>!]*[=<>!])", line)]
    return Constraints(tuple(_parsed(part.strip()) for part in parts))


def _parsed(part: str) -> Constraint:
    relation = next((each for each in RELATIONS if each in part), "")
    key, _, words = part.partition(relation) if relation else (part, "", "")
    if not (key.strip() and words.strip()):
        raise ConfigError(f"--constraints: {part!r} should read key=value or key<=number, for example {FORM}")
    values = [parse_pairs("constraints", f"{key.strip()}={word}")[key.strip()] for word in words.split("|")]
    return Constraint(key.strip(), relation, tuple(values))
