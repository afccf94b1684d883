"""Checkpoints of one run: their names, the newest sound one, and which of them are kept.

checkpoints/step_00001000.h5                             step_of -> 1000
            step_00002000.h5
            step_00003000.h5.tmp-node7-4711-9f3a11bc     a writer at work, or what a killed one left
            step_00000500.h5.damaged                     could not be loaded when a run resumed from an older one

Kept are the newest, one every so many steps for ever, and the best by validation loss:

    step       100   200   300   400   500   600   700     keep = 2, keep_every_steps = 300, keep_best = 1
    held out  3.1   2.9   2.7   2.8   3.0   3.2    -
    kept                   x                 x     x       300: for ever, and the best; 600 and 700: the newest
    deleted    x     x           x     x                   the oldest first, once nothing else is left to do

Only sound files count as the newest, and nothing is deleted while there are fewer than `keep` of them: whatever stops
us in the middle, and whatever happened to a file, the last resort is never deleted.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpcllm.checkpoint.directory import is_ours
from hpcllm.checkpoint.inspect import verify_file
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.config.schema import CheckpointConfig
from hpcllm.errors import CheckpointError, DataError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.raw_files import disk_errors

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
DAMAGED = ".damaged"
_NAME = re.compile(r"step_(\d{8,})\.h5")
_TEMPORARY = re.compile(r"step_\d{8,}\.h5\.tmp-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
_STALE_S = 3600.0  # a writer on another node that wrote nothing for so long is dead


def file_name(step: int) -> str:
    """Name of a checkpoint: sorts by step up to 10^8 steps, and is told apart from any other file at any step."""
    return f"step_{step:08d}.h5"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step; none if there is no such folder. Raises CheckpointError."""
    with disk_errors(CheckpointError, f"cannot list {folder}"):
        found = list(folder.iterdir()) if folder.exists() else []
    steps = [(step, path) for path in found if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def load_newest(
    folder: Path, comm: MPI.Intracomm | None, load: Callable[[Checkpoint], T]
) -> tuple[T | None, list[str]]:
    """Load the newest checkpoint that can be loaded; returns what `load` returned, and a line for each one passed over.

    load: is given the open file, reads what it needs, and raises CheckpointError on all ranks where the file is
    damaged; then the next older one is tried. Any other error, such as a ConfigError about another model, ends the
    search. (None, []): the folder has no checkpoint. Damaged files are renamed, or they would count among the newest
    that are kept. Collective over comm; the same on all ranks. Raises CheckpointError if there are checkpoints and none
    is sound: training never begins anew by itself.
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
        lines = list(passed_over.values())
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        none_sound = CheckpointError(
            f"{folder} has checkpoints, but none that can be loaded: {'; '.join(lines[:3])}{more}. Put a sound one "
            "there, or start anew with --restart (the old run folder is kept beside)"
        )
        none_sound.everywhere = True
        raise none_sound
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


def locate(path: Path) -> Path:
    """The file itself, or the newest checkpoint of a folder. Not collective. Raises DataError, CheckpointError."""
    found = locate_all(path)[0]
    if found == path and not _is_ours(path):
        valid = "a file step_00001000.h5 that train wrote, or its run folder"
        if path.suffix == ".safetensors":
            valid = "the folder that it is in, where Hugging Face's weights are taken"
        raise DataError(f"{str(path)!r} is no checkpoint: it does not begin as they do; valid: {valid}")
    return found


def _is_ours(path: Path) -> bool:
    """True if a file that the user names begins as our checkpoints do. Raises DataError if it cannot be read."""
    try:
        return is_ours(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error


def locate_all(path: Path) -> list[Path]:
    """The file itself, or the checkpoints of a folder, the newest first; at least one.

    Not collective. Raises DataError, CheckpointError.
    """
    if fault := fault_of(path) or fault_of(path / "checkpoints"):
        raise DataError(f"cannot look at {shown(str(path))}: {fault}")
    if path.is_dir():
        for folder in (path / "checkpoints", path):
            if folder.exists() and not os.access(folder, os.R_OK):
                raise DataError(f"cannot look into {shown(str(folder))}: there is no right to list it")
            if found := newest_first(folder):
                return found
        raise DataError(f"{path} has no checkpoint; a run folder has some in checkpoints/, named as step_00001000.h5")
    if not path.exists():
        raise DataError(f"there is no checkpoint {str(path)!r}")
    return [path]


def new_file(path: Path, name: str) -> Path:
    """A file to be written: the path, or `name` in it if it is a folder. Raises DataError if it exists."""
    target = path / name if path.is_dir() else path
    if target.exists() or target.is_symlink():
        raise DataError(f"{target} is there already; remove it, or name another")
    return target


@dataclass(frozen=True)
class Found:
    """A checkpoint file of the folder, as far as retention cares."""

    path: Path
    sound: bool  # complete, its tables undamaged
    validation_loss: float = math.inf  # inf: was not measured at its step


@dataclass
class Retention:
    """Deletes superseded checkpoints of a folder. On one rank; each file is opened once, unless it changes."""

    path: Path
    _known: dict[tuple[Path, int, int], Found] = field(default_factory=dict)  # and time and size of the file

    def tidy(self, keep: CheckpointConfig) -> str:
        """Delete superseded checkpoints, and what killed writers left. For one rank, after a write.

        Returns "", or what could not be deleted and why: a run whose checkpoint is on disk need not end for it.
        """
        try:
            _deleted(superseded(newest_first(self.path), self.look, keep))
            sweep(self.path)
        except CheckpointError as error:
            return f"note: {error}"
        return ""

    def look(self, path: Path) -> Found:
        """Look into a file; one that cannot be read is not sound."""
        try:
            facts = path.stat()
        except OSError:
            return Found(path, sound=False)
        key = path, facts.st_mtime_ns, facts.st_size
        if key not in self._known:
            try:
                with Checkpoint.open(path) as checkpoint:
                    loss = checkpoint.attributes.get("run/validation_loss")
                self._known[key] = Found(path, True, loss if isinstance(loss, float) else math.inf)
            except CheckpointError:
                self._known[key] = Found(path, sound=False)
        return self._known[key]


def superseded(newest_first: Sequence[Path], look: Callable[[Path], Found], keep: CheckpointConfig) -> list[Path]:
    """Checkpoints that need not be kept, the oldest first. look: opens a file, so called as little as possible."""
    sound = 0
    for place, path in enumerate(newest_first):
        sound += look(path).sound
        if sound == keep.keep:
            kept, every = _best(newest_first, look, keep.keep_best), keep.keep_every_steps
            kept |= {path for path in newest_first if every and (step_of(path) or 0) % every == 0}
            return [path for path in newest_first[:place:-1] if path not in kept]
    return []


def _best(newest_first: Sequence[Path], look: Callable[[Path], Found], count: int) -> set[Path]:
    """The `count` files of lowest loss; of equal losses the newer one is better."""
    found = [look(path) for path in newest_first] if count else []
    measured = [one for one in found if one.sound and math.isfinite(one.validation_loss)]
    return {one.path for one in sorted(measured, key=lambda one: one.validation_loss)[:count]}


def sweep(folder: Path) -> list[Path]:
    """Delete temporary files of writers that are gone; returns them. For one rank. Raises CheckpointError."""
    matches = [(path, match) for path in folder.glob("step_*.tmp-*") if (match := _TEMPORARY.fullmatch(path.name))]
    return _deleted(
        path for path, match in matches if not _is_being_written(path, match["host"], int(match["process"]))
    )


def _deleted(paths: Iterable[Path]) -> list[Path]:
    deleted = []
    for path in paths:
        with disk_errors(CheckpointError, f"cannot delete {path}"):
            path.unlink(missing_ok=True)
        deleted.append(path)
    return deleted


def _is_being_written(path: Path, host: str, process: int) -> bool:
    try:
        silent_s = time.time() - path.stat().st_mtime
    except OSError:
        return False
    return silent_s < _STALE_S and (host != socket.gethostname() or _is_alive(process))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
