"""Text files that a user names: run, schedule and machine files, traces, tables of measurements, job files.

    path --> can be looked at? --> regular file? --> not larger than is meant for it? --> UTF-8 --> text
             name too long, loop,   folder, pipe,     sparse, of another kind
             no right, NUL          device

Nothing is opened before it is known to be a regular file, for to open a pipe waits for its writer and a device may
have no end; and no more is read than is allowed, whatever size the file claims. Pure.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

MIB = 1 << 20
LARGEST_SETTINGS_BYTES = 4 * MIB  # run file, machine file: written by hand, or by a measurement of one machine
HDF5 = b"\x89HDF\r\n\x1a\n"  # at 0, or behind a block of the user's: store and checkpoint
LARGEST_TABLE_BYTES = 64 * MIB  # schedule, trace, results: a line for each action of each rank


def read_text(path: str | Path, most_bytes: int = LARGEST_SETTINGS_BYTES) -> str:
    """Read a text file of at most so many bytes. Raises ValueError, whose text is the reason."""
    return decoded(read_bytes(path, most_bytes))


def read_bytes(path: str | Path, most_bytes: int = LARGEST_SETTINGS_BYTES) -> bytes:
    """Read a file of at most so many bytes. Raises ValueError, whose text is the reason."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(most_bytes + 1) if os.fstat(file.fileno()).st_size <= most_bytes else None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if data is None or len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes >> 20} MiB, the most that is read of such a file")
    return data


def open_regular(path: str | Path) -> int:
    """Open a regular file, or a link to one; returns a descriptor, to be closed by the caller.

    Raises OSError, or ValueError for a name with a NUL character, and for anything else than a regular file.
    """
    if stat.S_ISREG(os.stat(path).st_mode):  # first, as to open a device can have effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise ValueError("it is a folder, pipe or device; valid: a regular file")


def fault_of(path: str | Path) -> str:
    """Say why nobody can tell what is at a path; empty if that is known, also that nothing is there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:  # ValueError: a NUL character, or a surrogate that no name has
        return str(getattr(error, "strerror", None) or error)
    return ""


def decoded(data: bytes) -> str:
    """Decode UTF-8. Raises ValueError that says which byte is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = "an HDF5 file" if data[error.start :].startswith(HDF5) else "not UTF-8"
        raise ValueError(f"{kind}: byte {data[error.start]:#04x} at {error.start}; valid: a text file") from error
