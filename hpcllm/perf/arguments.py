"""The command line of a measurement, checked once. Pure: no torch, no MPI."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcllm.codecs.names import examples, parse_name
from hpcllm.errors import ConfigError
from hpcllm.policy import POLICIES

UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LARGEST_BYTES = 1 << 40
SIZES_ARE = (
    "Sizes are bytes of uncompressed data, as OSU counts: of the whole array for allreduce, reduce_scatter and "
    "broadcast, of the part that each rank contributes for allgather, of the block for each rank for alltoall."
)
PICTURES = (".png", ".svg")
ALL_CODECS = "raw,bf16,fp16,fp8,int8:256,int4:128,exp,zfp:8,zfp:16,mpc"


@dataclass(frozen=True)
class Options:
    """What to measure. The text forms are on the command line, see add_arguments."""

    sizes: tuple[int, ...]  # bytes
    codecs: tuple[str, ...]
    algorithms: tuple[str, ...] = ()  # empty: the ones worth comparing
    dtype: str = "float32"
    device: str = "cpu"
    gpu_aware: str = "auto"
    memory: str = "private"
    iterations: int = 0  # 0: by size
    warmup: int = 2
    check: bool = False
    tuning: Path | None = None
    bandwidth_gb_s: float | None = None  # None: measured
    json: Path | None = None  # Path("-"): standard output
    plot: Path | None = None

    def rounds(self, size_bytes: int) -> int:
        """Timed iterations: many of what is short and scatters, at least 7 of anything."""
        return self.iterations or min(200, max(7, (64 << 20) // max(1, size_bytes)))


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help="write the records as JSON; - for standard output, and only that"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw them: .png or .svg (needs the extra `plot`)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What p2p takes, and part of every other measurement."""
    _add_common(parser, sizes="1K:64M", codecs="raw")
    parser.add_argument("--bandwidth", metavar="GB/S", help="of the link, for the bound; default: measured first")
    _add_device(parser)
    parser.add_argument(
        "--gpu-aware",
        metavar="auto|yes|no",
        default="auto",
        help="gpu: may MPI read the device's memory; auto: tried out (default: auto)",
    )


def add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, sizes="64K,1M,16M", codecs=ALL_CODECS)
    _add_device(parser)


def add_collective_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.epilog = SIZES_ARE
    parser.add_argument(
        "--algorithms",
        metavar="LIST",
        help="names with commas, or all; mpi is the library's bare blocking call, native ours to the library",
    )
    parser.add_argument(
        "--memory",
        metavar="private|shared",
        default="private",
        help="shared: arrays in the node's shared memory, as the trainer holds its gradients (default: private)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare every value with a float64 sum; exit code 1 if off"
    )
    parser.add_argument("--tuning", metavar="FILE", help="tuning.toml for the algorithm auto, from the command tune")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.toml", help="a run file, as for `hpcllm train`")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure kernels and links for `python -m hpcllm plan --calibrate FILE` instead, with no run file",
    )
    parser.add_argument(
        "--precisions", default="", metavar="LIST", help="with --calibrate: of fp32, bf16, fp16 (default: by device)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key, as for train"
    )
    parser.add_argument(
        "--policies", default="none,hpcllm", metavar="LIST", help=f"with commas, of {', '.join(POLICIES)}"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of each policy (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records as JSON")


def _add_common(parser: argparse.ArgumentParser, sizes: str, codecs: str) -> None:
    parser.add_argument(
        "--sizes",
        metavar="A:B",
        default=sizes,
        help=f"1K:256M, powers of two between, or a list 64K,1M; K, M, G are powers of 1024 (default: {sizes})",
    )
    parser.add_argument("--codecs", metavar="LIST", default=codecs, help=f"names with commas (default: {codecs})")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--iterations", metavar="N", default="0", help="timed ones of each case (default: by size)")
    parser.add_argument("--warmup", metavar="N", default="2", help="iterations before the timed ones (default: 2)")
    add_output(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="cpu|gpu",
        default="cpu",
        help="where the arrays live; gpu: one device a rank, of CUDA, ROCm or XPU (default: cpu)",
    )


def options_of(arguments: argparse.Namespace) -> Options:
    """Raises ConfigError: the key, the value, what is valid."""
    given = vars(arguments)
    dtype = _one_of("dtype", given["dtype"], VALUE_BYTES)
    return Options(
        sizes=tuple(parse_sizes(given["sizes"], VALUE_BYTES[dtype])),
        codecs=tuple(dict.fromkeys(_codec(name) for name in _names("codecs", given["codecs"]))),
        algorithms=tuple(dict.fromkeys(_names("algorithms", given["algorithms"]))) if given.get("algorithms") else (),
        dtype=dtype,
        device=_one_of("device", given.get("device", "cpu"), ("cpu", "gpu")),
        gpu_aware=_one_of("gpu-aware", given.get("gpu_aware", "auto"), ("auto", "yes", "no")),
        memory=_one_of("memory", given.get("memory", "private"), ("private", "shared")),
        iterations=_count("iterations", given["iterations"]),
        warmup=_count("warmup", given["warmup"]),
        check=given.get("check", False),
        tuning=Path(given["tuning"]) if given.get("tuning") else None,
        bandwidth_gb_s=_positive("bandwidth", given["bandwidth"]) if given.get("bandwidth") else None,
        json=Path(given["json"]) if given["json"] else None,
        plot=picture_path(given["plot"]) if given["plot"] else None,
    )


def parse_size(text: str) -> int:
    """'64K' -> 65536 bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:I?B)?", text.strip().upper())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < size <= LARGEST_BYTES:
        raise ConfigError(f"--sizes {text!r} is no size; valid: 4, 64K, 16M, 1G, up to {LARGEST_BYTES >> 30}G")
    return size


def parse_sizes(text: str, value_bytes: int) -> list[int]:
    """'1K:1M,3M' -> ascending bytes, each once, each a whole number of values. Raises ConfigError."""
    sizes: set[int] = set()
    for part in _names("sizes", text):
        first, colon, last = part.partition(":")
        sizes.update(_doublings(part, parse_size(first), parse_size(last)) if colon else [parse_size(first)])
    odd = [size for size in sorted(sizes) if size % value_bytes]
    if odd:
        raise ConfigError(f"--sizes {text!r}: {odd[0]} bytes are no whole number of values of {value_bytes} bytes")
    return sorted(sizes)


def _doublings(text: str, first: int, last: int) -> Iterable[int]:
    """first, 2 first, 4 first ... up to last; last too where doubling does not meet it."""
    if last < first:
        raise ConfigError(f"--sizes {text!r}: the first is above the last; valid: 1K:64M")
    return [*(first << k for k in range((last // first).bit_length())), last]


def picture_path(text: str) -> Path:
    """The path of a picture that can be drawn here. Raises ConfigError."""
    path = Path(text)
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"a picture {text!r} cannot be drawn; valid: a name that ends in {' or '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"drawing {text!r} needs matplotlib: pip install 'hpcllm[plot]'")
    return path


def _names(key: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise ConfigError(f"--{key} {text!r} has an empty name; valid: names with commas between")
    return names


def _codec(name: str) -> str:
    try:
        return str(parse_name(name))
    except ValueError as error:
        raise ConfigError(f"--codecs: {error} (one of each kind: {', '.join(examples())})") from error


def _one_of(key: str, value: str, valid: Iterable[str]) -> str:
    if value not in valid:
        raise ConfigError(f"--{key} {value!r} is unknown; valid: {', '.join(valid)}")
    return value


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"--{key} {text!r} is no count; valid: a whole number from 0")
    return int(text)


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--{key} {text!r} is no bandwidth; valid: GB/s above 0, as in 0.125 for 1 Gbit/s")
    return value
