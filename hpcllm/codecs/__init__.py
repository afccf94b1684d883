"""Codecs: values <-> bytes on the wire. They never see a communicator.

names.py, protocol.py              names, pure; the interface of a codec
catalogue.py                       a codec by its name, for arrays on the CPU or a device
casts.py                           raw, bf16, fp16
blocks.py, quantise.py             int8, int4, fp8: codes and a scale for each block
tiles.py, exponent.py with exponent_encode.py, mpc.py      exp, mpc: lossless, of variable rate
zfp.py with zfp_planes.py          zfp
kernels.py, gpu/                   how kernels are compiled on the CPU; kernels on devices

This file imports torch only when Codec or find_codec is first used.
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
