"""The command lines of all commands: options, and `type=` functions that check each value once. Pure: no torch, no MPI.

A value that is not valid raises ConfigError with the option, the value and what is valid; __main__.py says it once,
however many ranks made the same mistake.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from hpcllm.codecs.names import examples, parse_name
from hpcllm.collectives.cost import COSTS
from hpcllm.config.names import nearest
from hpcllm.config.policies import POLICIES
from hpcllm.errors import ConfigError
from hpcllm.plotting import picture_path
from hpcllm.system.command_line import one_of
from hpcllm.system.output import STANDARD_OUTPUT, add_output, json_file

UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LARGEST_BYTES = 1 << 40
SIZES_ARE = (
    "Sizes are bytes of uncompressed data, as OSU counts: of the whole array for allreduce, reduce_scatter and "
    "broadcast, of the part that each rank contributes for allgather, of the block for each rank for alltoall."
)
ALL_CODECS = "raw,bf16,fp16,fp8,int8:256,int4:128,exp,zfp:8,zfp:16,mpc"
TUNE_CODECS, TUNE_SIZES = "int8:256,exp", "4K,64K,1M,16M"


@dataclass(frozen=True)
class Options:
    """Options of a measurement, as the command line gives them. Raises ConfigError."""

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
    wide: bool = False  # all columns of the table
    plot: Path | None = None

    def __post_init__(self) -> None:
        check_sizes(self.sizes, VALUE_BYTES[self.dtype])

    def rounds(self, size_bytes: int) -> int:
        """Timed iterations: many of what is short and scatters, at least 7 of anything."""
        return self.iterations or min(200, max(7, (64 << 20) // max(1, size_bytes)))


def options_of(arguments: argparse.Namespace) -> Options:
    """Options of a parsed command line. Raises ConfigError."""
    given = vars(arguments)
    return Options(**{field.name: given[field.name] for field in fields(Options) if field.name in given})


def add_p2p_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of p2p, which the collectives take too."""
    _add_common(parser, sizes="1K:64M", codecs="raw")
    what = "of the link, for the bound; default: measured first"
    parser.add_argument("--bandwidth", metavar="GB/S", type=bandwidth, dest="bandwidth_gb_s", help=what)
    what = "gpu: may MPI read the device's memory; auto: tried out (default: auto)"
    _add_choice(parser, "gpu-aware", ("auto", "yes", "no"), what)


def add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of codec."""
    _add_common(parser, sizes="64K,1M,16M", codecs=ALL_CODECS)


def add_collective_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of allreduce, reduce_scatter, allgather, alltoall and broadcast."""
    add_p2p_arguments(parser)
    parser.epilog = SIZES_ARE
    what = "names with commas, or all; mpi is the library's bare blocking call, native ours to the library"
    parser.add_argument("--algorithms", metavar="LIST", type=names("algorithms"), default=(), help=what)
    what = "shared: arrays in the node's shared memory, as the trainer holds its gradients (default: private)"
    _add_choice(parser, "memory", ("private", "shared"), what)
    what = "compare every value with a float64 sum; exit code 1 if off"
    parser.add_argument("--check", action="store_true", help=what)
    what = "tuning.toml for the algorithm auto, from the command tune"
    parser.add_argument("--tuning", metavar="FILE", type=Path, help=what)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of step."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.toml", help="a run file, as for `hpcllm train`")
    what = "measure kernels and links for `python -m hpcllm plan --calibrate FILE` instead, with no run file"
    parser.add_argument("--calibrate", action="store_true", help=what)
    what = "with --calibrate: of fp32, bf16, fp16 (default: by device)"
    parser.add_argument("--precisions", default="", metavar="LIST", help=what)
    what = "override a key, as for train"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=what)
    of, what = names("policies", POLICIES), f"with commas, of {', '.join(POLICIES)}"
    parser.add_argument("--policies", type=of, default="none,hpcllm", metavar="LIST", help=what)
    _add_count(parser, "steps", "timed steps of each policy (default: 10)", default=10, least=1)
    _add_count(parser, "warmup", "steps before them (default: 2)", default=2)
    add_output(parser, "the records as JSON")


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of tune."""
    parser.description = (
        "Measure links, codecs and the MPI library (a few seconds), write them to a file that [communication] tuning "
        "and --tuning read, then time what would be chosen beside all else."
    )
    what = "a run file: measure the codecs that it asks for, too"
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.toml", help=what)
    what = "override a key, as for train"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=what)
    parser.add_argument("--output", type=Path, default=Path("tuning.toml"), metavar="FILE", help="default: tuning.toml")
    what = f"measured and requested in the table, beside raw (default: the run file's, else {TUNE_CODECS})"
    parser.add_argument("--codecs", type=codec_names, metavar="LIST", help=what)
    read, what = partial(parse_sizes, value_bytes=4), f"of whole arrays, 1K:256M or a list (default: {TUNE_SIZES})"
    parser.add_argument("--sizes", type=read, default=TUNE_SIZES, metavar="A:B", help=what)
    of = names("operations", COSTS)
    parser.add_argument("--operations", type=of, default=",".join(COSTS), metavar="LIST", help="default: all five")
    parser.add_argument("--rates-only", action="store_true", help="write the file and time no collectives")
    add_output(parser, "the table as JSON")


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of plot."""
    what = "what --json wrote, of one or several runs"
    parser.add_argument("files", nargs="+", type=Path, metavar="RECORDS.json", help=what)
    parser.add_argument("--plot", type=picture_path, metavar="FILE", help="the picture: .png or .svg")
    parser.add_argument("--markdown", action="store_true", help="print the records as Markdown tables")
    what = "the records of all files as JSON: on standard output alone, or in FILE.json"
    parser.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, type=json_file, metavar="FILE", help=what)


def _add_common(parser: argparse.ArgumentParser, sizes: str, codecs: str) -> None:
    what = f"1K:256M, powers of two between, or a list 64K,1M; K, M, G are powers of 1024 (default: {sizes})"
    parser.add_argument("--sizes", metavar="A:B", type=parse_sizes, default=sizes, help=what)
    what = f"names with commas (default: {codecs})"
    parser.add_argument("--codecs", metavar="LIST", type=codec_names, default=codecs, help=what)
    _add_choice(parser, "dtype", tuple(VALUE_BYTES), "float32 (default), bfloat16 or float16", metavar="NAME")
    _add_count(parser, "iterations", "timed ones of each case (default: by size)", default=0)
    _add_count(parser, "warmup", "iterations before the timed ones (default: 2)", default=2)
    add_output(parser, "the records as JSON")
    what = "draw them: .png or .svg (needs the extra `plot`)"
    parser.add_argument("--plot", metavar="FILE", type=picture_path, help=what)
    what = "where the arrays live; gpu: one device a rank, of CUDA, ROCm or XPU (default: cpu)"
    _add_choice(parser, "device", ("cpu", "gpu"), what)


def _add_choice(
    parser: argparse.ArgumentParser, key: str, valid: Sequence[str], help_text: str, metavar: str = ""
) -> None:
    """Add an option with one of the valid names; the first is the default."""

    of = metavar or "|".join(valid)
    parser.add_argument(f"--{key}", metavar=of, type=one_of(f"--{key}", valid), default=valid[0], help=help_text)


def _add_count(parser: argparse.ArgumentParser, key: str, help_text: str, default: int, least: int = 0) -> None:
    def count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < least:
            raise ConfigError(f"--{key} {text!r} is no count; valid: a whole number from {least}")
        return int(text)

    parser.add_argument(f"--{key}", metavar="N", type=count, default=default, help=help_text)


def names(key: str, valid: Collection[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A type= function: 'a,b' -> ('a', 'b'), each once, in their order. valid: all names there are, if known."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if "" in found:
            raise ConfigError(f"--{key} {text!r} has an empty name; valid: names with commas between")
        for name in found:
            if valid and name.lower() not in valid:
                raise ConfigError(f"--{key} {name!r} is unknown; {nearest(name, valid)}")
        return tuple(name.lower() for name in found) if valid else found

    return parse


def codec_names(text: str) -> tuple[str, ...]:
    """Spell out codecs, 'int8,raw' -> ('int8:256', 'raw'), each once. Raises ConfigError."""
    try:
        return tuple(dict.fromkeys(str(parse_name(name)) for name in names("codecs")(text)))
    except ValueError as error:
        raise ConfigError(f"--codecs: {error} (one of each kind: {', '.join(examples())})") from error


def bandwidth(text: str) -> float:
    """GB/s of a link. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"--bandwidth {text!r} is no bandwidth; valid: GB/s above 0, as in 0.125 for 1 Gbit/s")
    return value


def parse_size(text: str) -> int:
    """'64K' -> 65536 bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15})([KMG]?)(?:I?B)?", text.strip().upper())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < size <= LARGEST_BYTES:
        raise ConfigError(f"--sizes {text!r} is no size; valid: 4, 64K, 16M, 1G, up to {LARGEST_BYTES >> 30}G")
    return size


def parse_sizes(text: str, value_bytes: int = 1) -> tuple[int, ...]:
    """'1K:1M,3M' -> ascending bytes, each once, each a whole number of values. Raises ConfigError."""
    sizes: set[int] = set()
    for part in names("sizes")(text):
        start, colon, end = part.partition(":")
        first, last = parse_size(start), parse_size(end if colon else start)
        if last < first:
            raise ConfigError(f"--sizes {part!r}: the first is above the last; valid: 1K:64M")
        sizes.update(first << k for k in range((last // first).bit_length()))
        sizes.add(last)  # where doubling does not meet it
    found = tuple(sorted(sizes))
    check_sizes(found, value_bytes)
    return found


def check_sizes(sizes: Iterable[int], value_bytes: int) -> None:
    """Raise ConfigError for a size that is no whole number of values."""
    odd = [size for size in sizes if size % value_bytes]
    if odd:
        raise ConfigError(f"--sizes: {odd[0]} bytes are no whole number of values of {value_bytes} bytes")
