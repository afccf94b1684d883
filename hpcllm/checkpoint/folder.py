"""The checkpoints of one run: names, the newest that is sound. How many stay: retention.py.

checkpoints/step_00001000.h5                             step_of -> 1000
            step_00002000.h5
            step_00003000.h5.tmp-node7-4711-9f3a11bc     a writer at work, or what a killed one left
            step_00000500.h5.damaged                     could not be loaded when a run went on from an older one
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.verify import verify_file
from hpcllm.errors import CheckpointError
from hpcllm.together import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
DAMAGED = ".damaged"
_NAME = re.compile(r"step_(\d{8,})\.h5")


def file_name(step: int) -> str:
    """Sorts by step up to 10^8 steps, and is told apart from any other file at any step."""
    return f"step_{step:08d}.h5"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step; none if there is no such folder. Raises CheckpointError."""
    try:
        steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror}") from error
    return [path for _, path in sorted(steps, reverse=True)]


def load_newest(
    folder: Path, comm: MPI.Intracomm | None, load: Callable[[Checkpoint], T]
) -> tuple[T | None, list[str]]:
    """What `load` makes of the newest checkpoint that it can load, and a line for each newer one passed over.

    load: is given the open file, reads what it needs, and raises CheckpointError on all ranks where the file is
    damaged; then the next older one is tried. What else it raises, such as a ConfigError about another model, ends the
    search. (None, []): the folder has no checkpoint. Damaged files are renamed, or they would count among the newest
    that stay. Collective over comm; the same on all ranks. Raises CheckpointError if there are checkpoints and none is
    sound: nobody's training begins anew unasked.
    """
    passed_over: dict[Path, str] = {}
    for path in on_root(comm, lambda: newest_first(folder)):
        try:
            with Checkpoint.open(path, comm) as checkpoint:
                loaded = load(checkpoint)
        except CheckpointError as error:
            passed_over[path] = f"{path.name} is passed over: {error}"
        else:
            return loaded, [_set_aside(path, line, comm) for path, line in passed_over.items()]
    if passed_over:
        raise _none_is_sound(folder, list(passed_over.values()))
    return None, []


def _set_aside(path: Path, line: str, comm: MPI.Intracomm | None) -> str:
    """Rename a file that is damaged on a second look too: a file system may have failed for a moment. Collective."""
    if verify_file(path, comm, lambda _: None).is_sound:
        return f"{line}; it is sound on a second look, and stays"

    def rename() -> str:
        aside = path.with_name(path.name + DAMAGED)
        try:
            path.rename(aside)
        except OSError as error:
            return f"{line}; it cannot be renamed: {error.strerror}"
        return f"{line}; it is now {aside.name}"

    return on_root(comm, rename)


def _none_is_sound(folder: Path, passed_over: list[str]) -> CheckpointError:
    more = f"; and {len(passed_over) - 3} more" if len(passed_over) > 3 else ""
    error = CheckpointError(
        f"{folder} has checkpoints, but none that can be loaded: {'; '.join(passed_over[:3])}{more}. Put a sound one "
        "there, or start anew with --restart (the old run folder is kept beside)"
    )
    error.everywhere = True
    return error
