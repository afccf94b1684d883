"""One measurement = one flat record; a file is a JSON list of them, a table has a row for each. Pure.

bytes       of uncompressed data a rank, as OSU counts (arguments.py)
*_s         seconds of one operation, the slowest rank's; median, least and most of the iterations
spread      interquartile range of those seconds over their median
algbw_gb_s  bytes / median_s; GB = 1e9 bytes
busbw_gb_s  rate at which the busiest rank's link would have carried the data without a codec (bus_factor)
rel_error   L2 norm of the error over L2 norm of the exact result, all values; null where one is NaN or infinite
ratio       bytes without a codec over bytes sent, all ranks, as counted on the wire
bound_s     physical limit for this codec on a link of link_gb_s, or null where there is no link
chosen      algorithm and codec that `auto` ran

Bytes that the busiest rank must send or receive, for `size` as OSU counts it and n ranks:

    allreduce       2 (n - 1) / n  size      out as parts of sums, back in as sums
    reduce_scatter    (n - 1) / n  size
    allgather         (n - 1)      size      from each other rank its part
    alltoall          (n - 1)      size
    broadcast, p2p                 size

bus bandwidth = these bytes / time: comparable over n and over operations, the numbers that nccl-tests prints (its
PERFORMANCE.md derives them; where it counts all ranks' parts as the size, the factor here has the n instead).
With several ranks on a node the link is the node's, and a node that adds up or keeps inside what it can must still pass
the same formula with nodes for n; for allgather and alltoall all of its ranks' share.
A codec of ratio r divides the bytes: bound = bytes / (r x link).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpcllm.errors import DataError
from hpcllm.system.output import write_whole
from hpcllm.system.text import aligned, counted, percent

POSITIVE = ("bytes", "median_s", "min_s", "max_s", "algbw_gb_s", "ratio", "ranks", "nodes")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case measured, as JSON holds it; see the module for what the numbers mean."""

    operation: str
    algorithm: str
    codec: str
    dtype: str
    ranks: int
    nodes: int
    bytes: int
    median_s: float
    min_s: float
    max_s: float
    spread: float
    iterations: int
    algbw_gb_s: float
    busbw_gb_s: float
    rel_error: float | None
    ratio: float
    library: str  # the MPI's name and version
    memory: str = "private"
    device: str = "cpu"
    bound_s: float | None = None
    link_gb_s: float | None = None
    chosen: str = ""
    threads: int = 1
    moved_gb_s: float | None = None  # codec: bytes read plus bytes written, over the time
    memcpy_share: float | None = None  # codec: moved_gb_s over that of a copy on as many threads


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def to_json(records: Sequence[Record]) -> str:
    """JSON text, one record a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(record), allow_nan=False) for record in records) + "\n]\n"


def write_json(path: Path, records: Sequence[Record]) -> None:
    """Write a file of records. Raises OSError."""
    write_whole(path, to_json(records))


def read_json(path: Path) -> list[Record]:
    """Records of a file. Raises DataError for one that --json did not write."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read records from {str(path)!r}: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(path)!r} holds no list of records")
    return [_record(path, index, row) for index, row in enumerate(rows)]


def _record(path: Path, index: int, row: Any) -> Record:
    known = {field.name: str(field.type) for field in fields(Record)}
    try:
        record = Record(**{key: value for key, value in row.items() if key in known})
    except (TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r}, record {index}: {error}") from error
    for key, value in asdict(record).items():
        if not isinstance(value, _types(known[key])) or isinstance(value, bool):
            raise DataError(f"{str(path)!r}, record {index}: {key} = {value!r} is not of type {known[key]}")
        if isinstance(value, int | float) and not (math.isfinite(value) and (value > 0 or key not in POSITIVE)):
            raise DataError(f"{str(path)!r}, record {index}: {key} = {value!r} is out of range")
    return record


def _types(declared: str) -> tuple[type, ...]:
    return {"str": (str,), "int": (int,), "float": (int, float)}.get(declared, (int, float, type(None)))


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes past the busiest rank's link, over the size."""
    others = ranks - 1
    factors = {
        "allreduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "allgather": others,
        "alltoall": others,
    }
    return float(factors.get(operation, ranks > 1))


def link_bytes(operation: str, size_bytes: int, ranks: int, nodes: int) -> float:
    """Bytes without a codec that the busiest link, a node's or on one node a rank's, carries in one direction."""
    if nodes == 1 or operation == "p2p":
        return bus_factor(operation, ranks) * size_bytes
    together = {"allgather": ranks / nodes, "alltoall": (ranks / nodes) ** 2}.get(operation, 1)
    return bus_factor(operation, nodes) * together * size_bytes


def bound_s(operation: str, size_bytes: int, ranks: int, nodes: int, ratio: float, link_gb_s: float) -> float:
    """Seconds below which no algorithm gets with a codec of that ratio; latency is not counted."""
    return link_bytes(operation, size_bytes, ranks, nodes) / (ratio * link_gb_s * 1e9)


Column = tuple[str, int, Callable[[Record], str]]  # title, width (negative: aligned to the left), what it shows

_NAMES: list[Column] = [
    ("bytes", 6, lambda record: size_text(record.bytes)),
    ("algorithm", -19, lambda record: record.algorithm),
    ("codec", -11, lambda record: record.codec),
]
_TIMES: list[Column] = [
    ("median", 8, lambda record: seconds_text(record.median_s)),
    ("min", 8, lambda record: seconds_text(record.min_s)),
    ("max", 8, lambda record: seconds_text(record.max_s)),
    ("spread", 6, lambda record: percent(record.spread, 0) if record.spread < 99.995 else "> 99 x"),
]
_QUALITY: list[Column] = [
    ("rel error", 9, lambda record: error_text(record.rel_error)),
    ("ratio", 5, lambda record: f"{record.ratio:.2f}"),
]
TRANSFER = [
    *_NAMES,
    *_TIMES,
    ("algbw GB/s", 10, lambda record: rate_text(record.algbw_gb_s)),
    ("busbw GB/s", 10, lambda record: rate_text(record.busbw_gb_s)),
    ("of bound", 8, lambda record: percent(record.bound_s / record.median_s, 0) if record.bound_s else ""),
    *_QUALITY,
    ("chosen", -1, lambda record: record.chosen),
]
CODEC = [
    _NAMES[0],
    ("algorithm", -9, lambda record: record.algorithm),  # encode, decode or memcpy
    _NAMES[2],
    ("threads", 7, lambda record: str(record.threads)),
    *_TIMES,
    ("values GB/s", 11, lambda record: rate_text(record.algbw_gb_s)),
    ("moved GB/s", 10, lambda record: rate_text(record.moved_gb_s)),
    ("of memcpy", 9, lambda record: "" if record.memcpy_share is None else percent(record.memcpy_share, 0)),
    *_QUALITY,
]


NARROW = {"bytes", "algorithm", "codec", "median"}  # columns of every table of 80 columns
OF_TRANSFER, OF_CODEC = {"spread", "busbw GB/s", "of bound"}, {"threads", "moved GB/s", "of memcpy", "ratio"}


def columns_of(record: Record, wide: bool = True) -> list[Column]:
    """Return the columns of a record's table: all, or those that fit in 80 columns."""
    of_codec = record.operation == "codec"
    shown = NARROW | (OF_CODEC if of_codec else OF_TRANSFER)
    return [column for column in (CODEC if of_codec else TRANSFER) if wide or column[0] in shown]


def table_head(columns: Sequence[Column]) -> str:
    return aligned([title for title, _, _ in columns], [width for _, width, _ in columns])


def table_row(record: Record, columns: Sequence[Column]) -> str:
    return aligned([show(record) for _, _, show in columns], [width for _, width, _ in columns])


def markdown(records: Sequence[Record]) -> str:
    """One table for each run (operation, ranks, library ...) among the records, in the order in which they come."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(run_title(record), []).append(record)
    return "\n".join(_markdown_run(title, rows) for title, rows in runs.items())


def run_title(record: Record) -> str:
    """Heading of one table: what its rows have in common."""
    ranks = f"{counted(record.ranks, 'rank')} on {counted(record.nodes, 'node')}"
    apart = [word for word in (record.device, record.memory) if word not in ("cpu", "private")]
    return ", ".join([record.operation, record.dtype, ranks, *apart, record.library])


def _markdown_run(title: str, records: Sequence[Record]) -> str:
    columns = columns_of(records[0])
    rows = [[name for name, _, _ in columns], ["---" if width < 0 else "---:" for _, width, _ in columns]]
    rows += [[show(record).replace("|", "\\|") for _, _, show in columns] for record in records]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def size_text(size_bytes: int) -> str:
    """65536 -> '64K': what --sizes reads."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def seconds_text(value_s: float) -> str:
    """Four digits and the unit that suits them."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value_s < 1000 * scale:
            return f"{_digits(value_s / scale)} {unit}"
    return f"{_digits(value_s)} s"


def rate_text(value_gb_s: float | None) -> str:
    return "" if value_gb_s is None else _digits(value_gb_s)


def error_text(rel_error: float | None) -> str:
    return "not finite" if rel_error is None else f"{rel_error:.1e}" if rel_error else "0"


def _digits(value: float) -> str:
    """Three digits that count, never an exponent."""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{min(max(decimals, 0), 8)}f}"  # at most 10 characters below 1
