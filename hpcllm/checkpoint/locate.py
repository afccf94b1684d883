"""Which file is meant where a checkpoint, a run folder or its checkpoints/ may be named, and which is to be written."""

from __future__ import annotations

import os
from pathlib import Path

from hpcllm.checkpoint import guard
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.regular import open_regular
from hpcllm.errors import CheckpointError, DataError


def locate(path: Path) -> Path:
    """The file itself, or the newest checkpoint of a folder. Not collective. Raises DataError, CheckpointError."""
    return locate_all(path)[0]


def locate_all(path: Path) -> list[Path]:
    """The file itself, or the checkpoints of a folder, the newest first; at least one.

    Not collective. Raises DataError, CheckpointError.
    """
    if path.is_dir():
        for folder in (path / "checkpoints", path):
            if found := newest_first(folder):
                return found
        raise DataError(f"{path} has no checkpoint; a run folder has some in checkpoints/, named as step_00001000.h5")
    if not path.exists():
        raise DataError(f"there is no checkpoint {str(path)!r}")
    return [path]


def is_ours(path: Path) -> bool:
    """Whether a file begins as our checkpoints do, sound or not. Raises CheckpointError if it cannot be read."""
    descriptor = open_regular(path)
    try:
        guard.read_front(descriptor)
    except CheckpointError:
        return False
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return True


def new_file(path: Path, name: str) -> Path:
    """A file that is to be written: the path, or `name` in it if it is a folder. Raises DataError if it is there."""
    target = path / name if path.is_dir() else path
    if target.exists() or target.is_symlink():
        raise DataError(f"{target} is there already; remove it, or name another")
    return target
