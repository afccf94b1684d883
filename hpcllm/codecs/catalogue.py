"""A codec by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from hpcllm.codecs.blocks import BlockCodec
from hpcllm.codecs.cast import Cast
from hpcllm.codecs.exponent import EXPONENT
from hpcllm.codecs.exponent_format import TILE
from hpcllm.codecs.fp8 import FP8
from hpcllm.codecs.gpu.catalogue import twin_of
from hpcllm.codecs.gpu.launch import launcher_of
from hpcllm.codecs.mpc import MPC, TILE_BYTES
from hpcllm.codecs.names import CodecName, parse_name
from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.quantise import INT4, INT4_STOCHASTIC, INT8, INT8_STOCHASTIC
from hpcllm.codecs.raw import Raw
from hpcllm.codecs.streams import TileCodec
from hpcllm.codecs.zfp import Zfp

VALUE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS: dict[str, Callable[[CodecName, torch.dtype], Codec]] = {
    "raw": lambda _, dtype: Raw(dtype),
    "bf16": lambda name, dtype: Cast(str(name), dtype, torch.bfloat16),
    "fp16": lambda name, dtype: Cast(str(name), dtype, torch.float16),
    "fp8": lambda name, dtype: BlockCodec(str(name), dtype, name.parameter, FP8),
    "int8": lambda name, dtype: BlockCodec(
        str(name), dtype, name.parameter, INT8_STOCHASTIC if name.stochastic else INT8
    ),
    "int4": lambda name, dtype: BlockCodec(
        str(name), dtype, name.parameter, INT4_STOCHASTIC if name.stochastic else INT4
    ),
    "exp": lambda name, dtype: TileCodec(str(name), dtype, TILE, EXPONENT),
    "mpc": lambda name, dtype: TileCodec(str(name), dtype, TILE_BYTES // dtype.itemsize, MPC),
    "zfp": lambda name, dtype: Zfp(str(name), dtype, name.parameter),
}


@cache
def find_codec(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Codec:
    """The codec of that name for arrays of that dtype, in the memory of devices of that type (torch's name).

    Raises ValueError with what would be valid.
    """
    if dtype not in VALUE_TYPES:
        raise ValueError(f"codec {name!r} takes {', '.join(map(str, VALUE_TYPES))}, not {dtype}")
    parsed = parse_name(name)
    host = KINDS[parsed.kind](parsed, dtype)
    return host if device == "cpu" else twin_of(host, launcher_of(device), device)
