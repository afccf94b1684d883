"""The twin of a codec for arrays on a device: the same name, the same bytes.

device       what runs                                      codecs
cuda         kernels, where CuPy is installed (ROCm too)    all
any other    torch's operations                             raw, bf16, fp16, int8 without :sr
"""

from __future__ import annotations

from hpcllm.codecs.blocks import BlockCodec
from hpcllm.codecs.cast import Cast
from hpcllm.codecs.gpu.blocks import BlockKernels
from hpcllm.codecs.gpu.casts import CastKernels, RawKernels
from hpcllm.codecs.gpu.launch import LAUNCHERS, Launcher
from hpcllm.codecs.gpu.plain import PlainInt8
from hpcllm.codecs.gpu.streams import TileKernels
from hpcllm.codecs.gpu.zfp import ZfpKernels
from hpcllm.codecs.names import parse_name
from hpcllm.codecs.protocol import Codec
from hpcllm.codecs.quantise import INT8
from hpcllm.codecs.raw import Raw
from hpcllm.codecs.streams import TileCodec
from hpcllm.codecs.zfp import Zfp

STREAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "exp": ("exponent", ("exponent_encode.cuh", "exponent_decode.cuh")),
    "mpc": ("mpc", ()),
}


def twin_of(host: Codec, launcher: Launcher | None, device: str) -> Codec:
    """host: the codec for the CPU; launcher: for devices of torch's type `device`. Raises ValueError if it has none."""
    twin = _with_kernels(host, launcher) if launcher else _plain(host)
    if twin is None:
        advice = "; the others need CuPy: pip install 'hpcllm[cuda13]', or see README for ROCm"
        raise ValueError(
            f"codec {host.name!r} has no kernels for {device!r} devices here; valid: raw, bf16, fp16, int8:32 to "
            f"int8:4096{advice if device in LAUNCHERS else ''}"
        )
    return twin


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
            source, parts = STREAMS[kind]
            return TileKernels(**vars(host), source=source, parts=parts, launcher=launcher)
        case Zfp():
            return ZfpKernels(**vars(host), launcher=launcher)
    return None


def _plain(host: Codec) -> Codec | None:
    if isinstance(host, Raw | Cast):
        return host  # torch's operations already
    if isinstance(host, BlockCodec) and host.format == INT8:
        return PlainInt8(**vars(host))
    return None
