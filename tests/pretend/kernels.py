"""Emulated kernels for the pretended device: as CUDA has them with CuPy, and an XPU has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import emulated

from hpcllm.codecs import find_codec
from hpcllm.codecs.gpu import launch

DEVICE = "pretend"


@contextmanager
def emulated_kernels() -> Iterator[None]:
    """Give the device kernels until the end of the block; what was found out about them before is forgotten."""
    launch.LAUNCHERS[DEVICE] = lambda: emulated.EMULATOR
    _forget()
    try:
        yield
    finally:
        del launch.LAUNCHERS[DEVICE]
        _forget()


def _forget() -> None:
    for known in (launch.launcher_of, find_codec):
        known.cache_clear()
