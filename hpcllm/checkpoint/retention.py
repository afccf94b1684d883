"""Which checkpoints of a run stay: the newest, every so many steps for ever, the best by validation loss.

    step       100   200   300   400   500   600   700     keep = 2, keep_every_steps = 300, keep_best = 1
    held out  3.1   2.9   2.7   2.8   3.0   3.2    -
    stays                  x                 x     x       300: for ever, and the best; 600 and 700: the newest
    goes       x     x           x     x                   the oldest first, once nothing else is left to do

Only sound files count as the newest, and nothing goes while there are fewer than `keep` of them: whatever stops us in
the middle, and whatever happened to a file, the last resort is never deleted.
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

from hpcllm.checkpoint.directory import read_directory
from hpcllm.checkpoint.folder import newest_first, step_of
from hpcllm.config import CheckpointConfig
from hpcllm.errors import CheckpointError

_TEMPORARY = re.compile(r"step_\d{8,}\.h5\.tmp-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
_STALE_S = 3600.0  # a writer on another node that wrote nothing for so long is dead


@dataclass(frozen=True)
class Found:
    """A file of the folder."""

    path: Path
    sound: bool  # complete, its tables undamaged
    validation_loss: float = math.inf  # inf: was not measured at its step


@dataclass
class Folder:
    """What one rank knows of the files in a folder: each is looked into once, unless it changes."""

    path: Path
    _known: dict[tuple[Path, int, int], Found] = field(default_factory=dict)  # and time and size of the file

    def tidy(self, keep: CheckpointConfig) -> str:
        """Delete what need not stay, and what killed writers left. For one rank, after a write.

        Returns what could not be deleted and why, "" if all was: a run whose checkpoint is on disk need not end for it.
        """
        try:
            _deleted(superseded(newest_first(self.path), self.look, keep))
            sweep(self.path)
        except CheckpointError as error:
            return f"note: {error}"
        return ""

    def look(self, path: Path) -> Found:
        """What a file is; one that cannot be read is not sound."""
        try:
            facts = path.stat()
        except OSError:
            return Found(path, sound=False)
        key = path, facts.st_mtime_ns, facts.st_size
        if key not in self._known:
            self._known[key] = _found(path)
        return self._known[key]


def superseded(newest_first: Sequence[Path], look: Callable[[Path], Found], keep: CheckpointConfig) -> list[Path]:
    """What need not stay, the oldest first. look: opens a file, so it is asked of no more files than it must be."""
    sound = 0
    for place, path in enumerate(newest_first):
        sound += look(path).sound
        if sound == keep.keep:
            stays = _best(newest_first, look, keep.keep_best)
            older = [path for path in newest_first[place + 1 :] if not _is_for_ever(path, keep.keep_every_steps)]
            return [path for path in reversed(older) if path not in stays]
    return []


def _best(newest_first: Sequence[Path], look: Callable[[Path], Found], count: int) -> set[Path]:
    """Of equal losses the newer one is better."""
    found = [look(path) for path in newest_first] if count else []
    measured = [one for one in found if one.sound and math.isfinite(one.validation_loss)]
    return {one.path for one in sorted(measured, key=lambda one: one.validation_loss)[:count]}


def _is_for_ever(path: Path, every_steps: int) -> bool:
    step = step_of(path)
    return every_steps > 0 and step is not None and step % every_steps == 0


def sweep(folder: Path) -> list[Path]:
    """Delete temporary files of writers that are gone; returns them. For one rank. Raises CheckpointError."""
    matches = [(path, match) for path in folder.glob("step_*.tmp-*") if (match := _TEMPORARY.fullmatch(path.name))]
    return _deleted(
        path for path, match in matches if not _is_being_written(path, match["host"], int(match["process"]))
    )


def _deleted(paths: Iterable[Path]) -> list[Path]:
    deleted = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot delete {path}: {error.strerror}") from error
        deleted.append(path)
    return deleted


def _found(path: Path) -> Found:
    try:
        loss = read_directory(path).attributes.get("run/validation_loss")
    except CheckpointError:
        return Found(path, sound=False)
    return Found(path, sound=True, validation_loss=loss if isinstance(loss, float) else math.inf)


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
