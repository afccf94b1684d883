"""The labs by number and name. Pure, so that `list` and `start` load neither torch nor mpi4py.

"2", "allreduce" --> Entry --load_lab--> labs/allreduce/checks.py: LAB
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcllm.config.names import closest
from hpcllm.errors import ConfigError

if TYPE_CHECKING:
    from hpcllm.course.lab import Lab


class Entry(NamedTuple):
    """A lab, before anything of it is loaded."""

    number: int
    name: str
    title: str

    @property
    def folder(self) -> Path:
        return Path(__file__).with_name("labs") / self.name

    @property
    def file_name(self) -> str:
        return f"{self.name}.py"


LABS = {
    entry.name: entry
    for entry in (
        Entry(1, "latency", "latency and bandwidth"),
        Entry(2, "allreduce", "a sum over all ranks"),
        Entry(3, "codec", "a lossy codec, and when it pays"),
        Entry(4, "pipeline", "pipeline schedules as data"),
        Entry(5, "tensor_parallel", "a layer split over ranks"),
        Entry(6, "zero", "who owns which optimizer state"),
        Entry(7, "checkpoint", "checkpoint and kill -9"),
        Entry(8, "planner", "time and memory by hand"),
    )
}  # fmt: skip


def find_lab(text: str) -> Entry:
    """Find a lab by its name or number. Raises ConfigError."""
    for entry in LABS.values():
        if text.lower() in (entry.name, str(entry.number)):
            return entry
    near = closest(text, LABS)
    valid = ", ".join(f"{entry.number} {entry.name}" for entry in LABS.values())
    raise ConfigError(f"there is no lab {text!r}; {f'did you mean {near}? ' if near else ''}valid: {valid}")


def load_lab(entry: Entry) -> Lab:
    """Load the checks of a lab."""
    lab: Lab = import_module(f"hpcllm.course.labs.{entry.name}.checks").LAB
    return lab
