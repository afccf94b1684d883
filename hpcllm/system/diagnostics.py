"""Signs of life of a rank, for whoever looks for a fault: log lines, and the stacks of all threads.

    HPCLLM_LOG=debug|info|warning    lines on standard error, each with time, rank and module
    a crash in compiled code         the Python stack of every thread
    SIGUSR2 to a rank's process      the same, and the rank goes on: kill -USR2 PID, scancel --signal=USR2 JOB.STEP
                                     (never to MPICH's mpirun, which ends and leaves its ranks behind)

Modules log by `logging.getLogger(__name__)`; without HPCLLM_LOG nothing is set up, and a debug line costs a comparison.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
from contextlib import suppress

from hpcllm.errors import ConfigError
from hpcllm.system.job import launched_rank

LEVELS = ("debug", "info", "warning")


def start() -> None:
    """Show stacks at a crash and on SIGUSR2, and log as HPCLLM_LOG says. Raises ConfigError."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError, io.UnsupportedOperation):  # stderr may be closed
        if not faulthandler.is_enabled():
            faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
    if level := os.environ.get("HPCLLM_LOG", ""):
        _start_log(level)


def _start_log(level: str) -> None:
    if level.lower() not in LEVELS:
        raise ConfigError(f"HPCLLM_LOG={level!r} is unknown; valid: {', '.join(LEVELS)}")
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {launched_rank()} %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("hpcllm")
    log.handlers = [handler]
    log.setLevel(level.upper())
    log.propagate = False
