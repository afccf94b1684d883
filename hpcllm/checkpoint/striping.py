"""Lustre: over how many targets a file is spread, which must be said when it is created.

    lfs setstripe -c 8 -S 16M FILE    an empty file with that layout; HDF5 then fills it

Where there is no `lfs`, or the folder is not on Lustre, the file is written all the same.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_LIMIT_S = 60.0


def set_stripes(path: Path, stripe_count: int, stripe_mib: int) -> str:
    """Create `path`, empty, spread over so many targets (-1: all). For one rank. Returns why not, where it is not."""
    wish = f"checkpoint.stripe_count = {stripe_count}"
    lfs = shutil.which("lfs")
    if not lfs:
        return f"{wish} has no effect: there is no `lfs` on PATH, so {str(path.parent)!r} is not taken for Lustre"
    command = [lfs, "setstripe", "-c", str(stripe_count), "-S", f"{stripe_mib}M", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{wish} has no effect: {' '.join(command)}: {error}"
    if done.returncode:
        return f"{wish} has no effect: {' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
    return ""
