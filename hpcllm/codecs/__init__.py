"""Codecs: values <-> bytes on the wire. They never see a communicator.

Names are in names.py, which is pure; the rest imports torch, and does so when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcllm.codecs.catalogue import find_codec
    from hpcllm.codecs.protocol import Codec

__all__ = ["Codec", "find_codec"]
_HOME = {"find_codec": "hpcllm.codecs.catalogue", "Codec": "hpcllm.codecs.protocol"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
