"""Rates of a machine, and the file that keeps them: tuning.toml <-> Tuning. Pure: no torch, no mpi4py.

    measure.py finds the numbers  ->  Rates  ->  cost.py computes with them        GB = 1e9 bytes
                                        |
                                   tuning.toml, written by `python -m hpcllm.perf tune`:
    [measured]  where and when         [near] [far] [window]  links          [core]  calls, copies
    [library.allreduce]  the MPI library's own, as one link         [codec."int8:256".float32]  ratio and rates

Files come from elsewhere: every key, type and range is checked before a number is used.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.codecs.names import examples, parse_name
from hpcllm.config.input_files import read_text
from hpcllm.errors import ConfigError
from hpcllm.system.text import printable

VALUE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
OPERATIONS = ("allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast")
LINK_KEYS = ("latency_s", "bandwidth_gb_s")
CORE_KEYS = ("call_s", "setup_s", "message_s", "copy_gb_s", "memory_gb_s")
LIBRARY_SHORT_KEYS = ("short_gb_s", "medium_gb_s")
LIBRARY_SIZES = (256 << 10, 1 << 20, 4 << 20)  # bytes of the arrays at which the library is measured
CODING_KEYS = ("ratio", "encode_gb_s", "decode_gb_s", "add_gb_s")
FACTS = {"machine": str, "library": str, "date": str, "ranks": int, "nodes": int}
TABLES = ("measured", "near", "far", "window", "core", "library", "codec")
COMMENTS = {
    "near": "between ranks of one node: seconds of an empty message, GB/s of each rank while all of them send",
    "far": "between nodes, if there was more than one: GB/s of a node while all its ranks send",
    "window": "a sum through a node's shared memory, as a link that a formula takes",
    "core": "seconds of a call, of preparing messages, of starting one; GB/s copied within caches, far beyond them",
    "library": "the MPI library's own collectives: seconds a round, GB/s of arrays of 4 MiB, 256 KiB and 1 MiB",
    "codec": "uncompressed bytes / bytes sent; GB/s of uncompressed bytes of one rank while all work",
}


@dataclass(frozen=True)
class Link:
    """Messages between two ranks or two nodes, as a line: seconds = latency + bytes / bandwidth."""

    latency_s: float  # of an empty message, beyond what it costs to start it
    bandwidth_gb_s: float  # each way, both ways busy

    def carry_s(self, size_bytes: float) -> float:
        return size_bytes / self.bandwidth_gb_s / 1e9


@dataclass(frozen=True)
class LibraryCall:
    """The MPI library's own collective: a link whose bandwidth goes with the size, by caches and by its algorithms."""

    latency_s: float  # of a round, of a value a rank
    bandwidth_gb_s: float  # of the bytes that must cross a link, arrays of LIBRARY_SIZES[2] and more
    short_gb_s: float | None = None  # the same, of LIBRARY_SIZES[0]; None: as that
    medium_gb_s: float | None = None  # and of LIBRARY_SIZES[1]

    def carry_s(self, crossing_bytes: float, size_bytes: float) -> float:
        """Seconds beyond the rounds of a call on size_bytes; between the measured sizes along a line."""
        if size_bytes >= LIBRARY_SIZES[-1]:
            return crossing_bytes / self.bandwidth_gb_s / 1e9
        long_gb_s = self.bandwidth_gb_s
        rates_gb_s = (self.short_gb_s or long_gb_s, self.medium_gb_s or long_gb_s, long_gb_s)
        share = crossing_bytes / size_bytes / 1e9
        sizes, times_s = [0], [0.0]
        for size, rate in zip(LIBRARY_SIZES, rates_gb_s, strict=True):
            sizes.append(size)
            times_s.append(share * size / rate)
        after = bisect_right(sizes, size_bytes)
        done = (size_bytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return times_s[after - 1] + done * (times_s[after] - times_s[after - 1])


@dataclass(frozen=True)
class Coding:
    """Rates of one codec for one dtype, in bytes of uncompressed values of one rank, all ranks of the node busy."""

    name: str
    ratio: float  # uncompressed bytes / bytes on the wire
    encode_gb_s: float
    decode_gb_s: float
    add_gb_s: float  # decode and add to fp32

    @property
    def raw(self) -> bool:
        return self.name == "raw"


@dataclass(frozen=True)
class Rates:
    """Measured rates that cost.py computes with."""

    near: Link  # between ranks of a node: of each rank, all of them sending
    far: Link  # between nodes: of a node, all its ranks sending
    window: Link  # node_window of a node's ranks as one link
    call_s: float  # seconds of a collective that has nothing to do
    setup_s: float  # seconds of an algorithm of ours before its first message
    message_s: float  # seconds to start one send and one receive
    copy_gb_s: float  # bytes copied by one rank, all of the node at work, in pieces that caches hold
    memory_gb_s: float  # bytes copied by one rank in pieces far larger than caches
    part_bytes: float = 1 << 19  # of values: what an owner adds up at once, see strips.py; on devices more
    codings: Mapping[tuple[str, str], Coding] = field(default_factory=dict)  # (codec, dtype): raw is one of them
    library: Mapping[str, LibraryCall] = field(default_factory=dict)  # by operation


@dataclass(frozen=True)
class Shape:
    """Numbers of ranks, nodes and lanes of a communicator."""

    ranks: int
    nodes: int = 1
    lanes: int = 1  # places that every node has a rank for
    crowded: bool = False  # on some node ranks outnumber the hardware threads that they may run on

    @property
    def node_ranks(self) -> int:
        """Number of ranks on the fullest node, if they are spread evenly."""
        return math.ceil(self.ranks / self.nodes)


@dataclass(frozen=True)
class Tuning:
    """Rates of an allocation, with the facts of their measurement."""

    rates: Rates
    facts: Mapping[str, str | int]  # machine, library, date, ranks, nodes


def nominal_ratio(codec: str, dtype: str) -> float:
    """Uncompressed bytes / bytes on the wire; for exp and mpc as gradients give it. Raises ValueError."""
    return VALUE_BITS[dtype] / parse_name(codec).bits(VALUE_BITS[dtype])


def load_tuning(path: str | Path) -> Tuning:
    """Read and check a file. Not collective: see collective_errors.on_root. Raises ConfigError."""
    try:
        tables = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # TOML and Unicode errors are ValueErrors
        raise ConfigError(f"cannot read the tuning file {str(path)!r}: {error}; `perf tune` writes one") from error
    try:
        return from_tables(tables)
    except ConfigError as error:
        raise ConfigError(f"tuning file {str(path)!r}: {error}") from error


def to_text(tuning: Tuning) -> str:
    """Text of the file, with a comment on each table; load_tuning gives back the same numbers."""
    lines = ['# Measured by `python -m hpcllm.perf tune`; read by [communication] tuning = "...". GB = 1e9 bytes.']
    for title, table in _tables(tuning):
        head = title.split(".")[0]
        if head in COMMENTS and not any(line.startswith(f"[{head}") for line in lines):
            lines += ["", f"# {COMMENTS[head]}"]
        lines += ["", f"[{title}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def from_tables(tables: dict[str, Any]) -> Tuning:
    """Check nested dicts and make a Tuning of them. Raises ConfigError with the key, the value and what is valid."""
    _known("", tables, TABLES)
    near = _link("near", _table(tables, "near"))
    core = _numbers("core", _table(tables, "core"), CORE_KEYS)
    rates = Rates(
        near=near,
        far=_link("far", tables["far"]) if "far" in tables else near,
        window=_link("window", _table(tables, "window")),
        codings=_codings(_table(tables, "codec")),
        library={name: _library_call(f"library.{name}", table) for name, table in _library(tables).items()},
        **core,
    )
    return Tuning(rates, _facts(_table(tables, "measured")))


def _tables(tuning: Tuning) -> Iterable[tuple[str, Mapping[str, Any]]]:
    rates = tuning.rates
    yield "measured", tuning.facts
    yield "near", dataclasses.asdict(rates.near)
    if rates.far != rates.near:
        yield "far", dataclasses.asdict(rates.far)
    yield "window", dataclasses.asdict(rates.window)
    yield "core", {key: getattr(rates, key) for key in CORE_KEYS}
    for operation, call in rates.library.items():
        numbers = dataclasses.asdict(call)
        yield f"library.{operation}", {key: value for key, value in numbers.items() if value is not None}
    for (codec, dtype), coding in rates.codings.items():
        yield f'codec."{codec}".{dtype}', {key: getattr(coding, key) for key in CODING_KEYS}


def _toml(value: str | float) -> str:
    return json.dumps(printable(value), ensure_ascii=False) if isinstance(value, str) else repr(value)


def _facts(table: dict[str, Any]) -> dict[str, str | int]:
    _known("measured", table, FACTS)
    for key, value in table.items():
        if type(value) is not FACTS[key]:
            raise ConfigError(f"measured.{key} = {value!r} should be {FACTS[key].__name__}")
    return table


def _library(tables: dict[str, Any]) -> dict[str, Any]:
    table = _table({"library": {}, **tables}, "library")  # one rank alone has no collectives to measure
    _known("library", table, OPERATIONS)
    return table


def _codings(table: dict[str, Any]) -> dict[tuple[str, str], Coding]:
    codings = {}
    for codec, dtypes in table.items():
        try:
            name = str(parse_name(codec))
        except ValueError as error:
            raise ConfigError(f"codec.{codec!r}: {error} (one of each kind: {', '.join(examples())})") from error
        _known(f"codec.{codec!r}", dtypes, VALUE_BITS)
        for dtype, numbers in dtypes.items():
            codings[name, dtype] = Coding(name, **_numbers(f"codec.{codec!r}.{dtype}", numbers, CODING_KEYS))
    if not any(codec == "raw" for codec, _ in codings):
        raise ConfigError("[codec.raw.float32] is missing: everything is compared with it")
    return codings


def _library_call(title: str, table: Any) -> LibraryCall:
    _known(title, table, (*LINK_KEYS, *LIBRARY_SHORT_KEYS))
    given = [key for key in LIBRARY_SHORT_KEYS if key in table]
    return LibraryCall(**_numbers(title, table, (*LINK_KEYS, *given)))


def _link(title: str, table: Any) -> Link:
    return Link(**_numbers(title, table, LINK_KEYS))


def _numbers(title: str, table: Any, keys: Iterable[str]) -> dict[str, float]:
    _known(title, table, keys)
    missing = [key for key in keys if key not in table]
    if missing:
        raise ConfigError(f"{title}.{missing[0]} is missing; valid: a number above 0")
    return {key: _positive(f"{title}.{key}", table[key]) for key in keys}


def _positive(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 1e-15 <= value <= 1e15:  # also rejects NaN; the range keeps sums finite
        raise ConfigError(f"{key} = {value!r} is out of range; valid: a finite number above 0")
    return float(value)


def _table(tables: dict[str, Any], title: str) -> dict[str, Any]:
    if title not in tables:
        raise ConfigError(f"[{title}] is missing; write the file anew with `python -m hpcllm.perf tune`")
    table = tables[title]
    if not isinstance(table, dict):
        raise ConfigError(f"{title} = {table!r} should be a table")
    return table


def _known(title: str, table: Any, valid: Iterable[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{title} = {table!r} should be a table")
    for key in table:
        if key not in valid:
            raise ConfigError(f"unknown key {title + '.' if title else ''}{key}; valid: {', '.join(valid)}")
