"""A regular file, opened to be read: never a directory, a pipe that nobody writes to, or a device without an end.

A link to a file is followed: where a checkpoint lies is its owner's affair. All reading goes through one descriptor, so
a file that takes the name of another does not mix with it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpcllm.errors import CheckpointError

_REQUEST_BYTES = 1 << 23  # Linux cuts calls at 2 GiB


def open_regular(path: Path) -> int:
    """A descriptor, to be closed by the caller. Raises CheckpointError."""
    descriptor = -1
    try:
        if stat.S_ISREG(os.stat(path).st_mode):  # first, as to open a device can have effects
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    raise CheckpointError(f"cannot read {path}: it is a directory, pipe or device; valid: a regular file")


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out`, bytes, from byte `offset` of the file on; returns how many there were. Raises OSError."""
    done = 0
    while done < len(out):
        count = os.preadv(descriptor, [out[done : done + _REQUEST_BYTES]], offset + done)
        if count == 0:
            break
        done += count
    return done
