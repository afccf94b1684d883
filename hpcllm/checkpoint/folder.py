"""The checkpoints of one run: names, the newest that is sound, how many stay.

checkpoints/step_00001000.h5                             step_of -> 1000
            step_00002000.h5
            step_00003000.h5.tmp-node7-4711-9f3a11bc     a writer at work, or what a killed one left
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.checkpoint.directory import read_directory
from hpcllm.checkpoint.reader import Checkpoint, on_root
from hpcllm.errors import CheckpointError

if TYPE_CHECKING:
    from mpi4py import MPI

_NAME = re.compile(r"step_(\d{8,})\.h5")
_TEMPORARY = re.compile(r"step_\d{8,}\.h5\.tmp-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")
_STALE_S = 3600.0  # a writer on another node that wrote nothing for so long is dead


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


def newest_valid(folder: Path, comm: MPI.Intracomm | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of which every byte is as it was written, and a line for each newer one passed over.

    It is open, to be closed by the caller, so that what is read from it is what was verified. Collective over comm; all
    ranks share the reading and get the same answer. (None, []): the folder has none.
    """
    passed_over: list[str] = []
    for path in on_root(comm, lambda: newest_first(folder)):
        try:
            return _open_verified(path, comm), passed_over
        except CheckpointError as error:
            passed_over.append(f"{path.name} is passed over: {error}")
    return None, passed_over


def _open_verified(path: Path, comm: MPI.Intracomm | None) -> Checkpoint:
    checkpoint = Checkpoint.open(path, comm)
    try:
        checkpoint.verify()
    except CheckpointError:
        checkpoint.close()
        raise
    return checkpoint


def keep_newest(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` sound checkpoints, and what killed writers left. For one rank, after a write.

    A file counts as sound if it is complete and its tables are undamaged; a file that is not is deleted only once
    `keep` newer ones are, so the last resort is never lost. Returns what was deleted. Raises CheckpointError.
    """
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would delete every checkpoint of {folder}; valid: 1 or more")
    doomed = [*_superseded(newest_first(folder), keep), *_stale(folder)]
    for path in doomed:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot delete {path}: {error.strerror}") from error
    return doomed


def _superseded(paths: list[Path], keep: int) -> list[Path]:
    """The oldest first, so that whatever stops us leaves the newest."""
    sound = 0
    for index, path in enumerate(paths):
        sound += _is_sound(path)
        if sound == keep:
            return paths[:index:-1]
    return []


def _is_sound(path: Path) -> bool:
    try:
        read_directory(path)
    except CheckpointError:
        return False
    return True


def _stale(folder: Path) -> list[Path]:
    matches = [(path, match) for path in folder.glob("step_*.tmp-*") if (match := _TEMPORARY.fullmatch(path.name))]
    return [path for path, match in matches if not _is_being_written(path, match["host"], int(match["process"]))]


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
