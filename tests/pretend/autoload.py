"""How a process that a test starts gets what the test has: PyTorch calls this at its import (entry point).

Found where tests/ is in PYTHONPATH, through tests/pretend_device-0.dist-info; without HPCLLM_PRETEND it does nothing.
The device, threads and messages are watched as in the test itself: a process with faults says them at its end, and its
exit code is FAULTY.
"""

from __future__ import annotations

import atexit
import os
import sys

FAULTY = 86
LATE = "late"  # the mode that has no device, only messages that are watched


def start() -> None:
    mode = os.environ.get("HPCLLM_PRETEND", "")
    if not mode:
        return
    import pretend

    if not hasattr(pretend, "watch"):
        return  # it is just being imported, and has imported PyTorch: a test, which starts all of this itself
    if mode != LATE and not pretend.why_not():
        pretend.start(open_=mode == "open")
    pretend.watch()
    atexit.register(end)


def end() -> None:
    """End the process with FAULTY if there are faults; after all else that is called at its end."""
    import pretend

    if faults := pretend.take_faults():
        print("pretended device:", *faults, sep="\n", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(FAULTY)
