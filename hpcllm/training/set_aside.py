"""Files of a run folder that no job can use are renamed, said in a line, and never a reason not to train.

    job.txt log.jsonl ...   regular file, small enough, may be read and written   used
                            folder, pipe, device, loop, anything else             NAME.damaged, NAME.damaged-2, ...
    trace                   folder                                                used
                            anything else                                         trace.damaged

A job that opens a pipe hangs, one that reads an endless device dies, and one that cannot open a folder ends at each
requeue, beside sound checkpoints. What log.jsonl holds is looked at line by line: log.py. Not for checkpoints: where
those cannot be, no run can go on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from hpcllm.config.names import shown

JOB = "job.txt"
FILES = ("log.jsonl", "log.jsonl.tmp", "log.jsonl.damaged", "ranks.txt", "run.toml", "finished", "trackers.json")
FOLDERS = ("trace",)
LARGEST_BYTES = 1 << 30  # a million logged steps; it is read whole


def set_aside_unusable(folder: Path, files: Iterable[str] = FILES, folders: Iterable[str] = FOLDERS) -> list[str]:
    """Rename what stands under these names and cannot be used; a line for each. For one process. Raises OSError."""
    wanted = [(name, stat.S_ISREG, "regular file") for name in files]
    wanted += [(name, stat.S_ISDIR, "folder") for name in folders]
    lines = []
    for name, is_kind, kind in wanted:
        path = folder / name
        if os.path.lexists(path) and (fault := _fault(path, is_kind, kind)):
            aside = _free_name(path)
            path.rename(aside)
            lines.append(f"{shown(str(path))} {fault}, so it is now {aside.name}")
    return lines


def _fault(path: Path, is_kind: Callable[[int], bool], kind: str) -> str:
    """Say why a path cannot be used, "" if it can. is_kind: of stat's tests."""
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not is_kind(status.st_mode):
        return f"is no {kind}"
    if not os.access(path, os.R_OK | os.W_OK):
        return "cannot be read and written"
    if status.st_size > LARGEST_BYTES:
        return f"is larger than {LARGEST_BYTES >> 30} GiB"
    return ""


def _free_name(path: Path) -> Path:
    for number in count(1):
        aside = path.with_name(f"{path.name}.damaged{f'-{number}' if number > 1 else ''}")
        if not os.path.lexists(aside):
            break
    return aside
