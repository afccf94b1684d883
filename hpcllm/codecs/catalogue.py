"""A codec by its name, for arrays on the CPU or on a device.

device       what runs                                      codecs
cpu          kernels of numba                               all
cuda         kernels, where CuPy is installed (ROCm too)    all
any other    torch's operations                             raw, bf16, fp16, int8 without :sr
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from hpcllm.codecs.blocks import BlockCodec
from hpcllm.codecs.casts import Cast, Raw
from hpcllm.codecs.exponent import EXPONENT
from hpcllm.codecs.exponent_encode import TILE
from hpcllm.codecs.gpu.device_codecs import BlockKernels, CastKernels, RawKernels, TileKernels, ZfpKernels
from hpcllm.codecs.gpu.launch import Launcher, launcher_of
from hpcllm.codecs.gpu.torch_int8 import TorchInt8
from hpcllm.codecs.mpc import MPC, TILE_BYTES
from hpcllm.codecs.names import CodecName, parse_name
from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.quantise import FP8, INT4, INT4_STOCHASTIC, INT8, INT8_STOCHASTIC
from hpcllm.codecs.tiles import TileCodec
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
TILE_TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "exp": ("exponent", ("exponent_encode.cuh", "exponent_decode.cuh")),
    "mpc": ("mpc", ()),
}


@cache
def find_codec(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Codec:
    """Return the codec of that name for arrays of that dtype, in memory of devices of that type (torch's name).

    Raises ValueError with what would be valid.
    """
    if dtype not in VALUE_TYPES:
        raise ValueError(f"codec {name!r} takes {', '.join(map(str, VALUE_TYPES))}, not {dtype}")
    parsed = parse_name(name)
    host = KINDS[parsed.kind](parsed, dtype)
    return host if device == "cpu" else device_codec(host, *launcher_of(device), device)


def device_codec(host: Codec, launcher: Launcher | None, why_none: str, device: str) -> Codec:
    """Return the codec with the same name and bytes for arrays on a device. Raises ValueError if there is none.

    host: the codec for the CPU; launcher: for devices of torch's type `device`; why_none: why there is no launcher.
    """
    found = _with_kernels(host, launcher) if launcher else _with_torch(host)
    if found is None:
        raise ValueError(
            f"codec {host.name!r} has no kernels for {device!r} devices here; valid: raw, bf16, fp16, int8:32 to "
            f"int8:4096; for the others: {why_none}"
        )
    return found


def _with_kernels(host: Codec, launcher: Launcher) -> Codec | None:
    kind = parse_name(host.name).kind
    match host:
        case Raw():
            return RawKernels(**vars(host), launcher=launcher)
        case Cast():
            return CastKernels(**vars(host), launcher=launcher)
        case BlockCodec():
            return BlockKernels(**vars(host), code=kind.capitalize(), launcher=launcher)
        case TileCodec():
            source, parts = TILE_TEXTS[kind]
            return TileKernels(**vars(host), source=source, parts=parts, launcher=launcher)
        case Zfp():
            return ZfpKernels(**vars(host), launcher=launcher)
    return None


def _with_torch(host: Codec) -> Codec | None:
    if isinstance(host, Cast):
        return host  # torch's operations already
    if isinstance(host, BlockCodec) and host.format == INT8:
        return TorchInt8(**vars(host))
    return None
