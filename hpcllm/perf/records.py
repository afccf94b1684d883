"""One measurement = one flat record; a file is a JSON list of them. Pure.

bytes       of uncompressed data a rank, as OSU counts (arguments.py)
*_s         seconds of one operation, the slowest rank's; median, least and most of the iterations
spread      interquartile range of those seconds over their median
algbw_gb_s  bytes / median_s; GB = 1e9 bytes
busbw_gb_s  what the busiest rank's link would have carried without a codec (limits.py)
rel_error   L2 norm of the error over L2 norm of the exact result, all values; null where one is NaN or infinite
ratio       bytes without a codec over bytes sent, all ranks, as counted on the wire
bound_s     physical limit for this codec on a link of link_gb_s, or null where there is no link
chosen      what `auto` ran
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpcllm.errors import ConfigError, DataError

STANDARD_OUTPUT = Path("-")
POSITIVE = ("bytes", "median_s", "min_s", "max_s", "algbw_gb_s", "ratio", "ranks", "nodes")


@dataclass(frozen=True, kw_only=True)
class Record:
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

    @property
    def of_bound(self) -> float | None:
        """The part of the physical limit that was reached."""
        return self.bound_s / self.median_s if self.bound_s else None


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def to_json(records: Sequence[Record]) -> str:
    """One record a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(record), allow_nan=False) for record in records) + "\n]\n"


def write_json(path: Path, records: Sequence[Record]) -> None:
    """Raises OSError."""
    write_whole(path, to_json(records))


def write_whole(path: Path, text: str) -> None:
    """Beside, then renamed: whoever reads sees a whole file. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError for a file that could not be written, before the work that it is to hold."""
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        if path.is_dir():
            raise ConfigError(f"cannot write {str(path)!r}: it is a folder")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"cannot write {str(path)!r}: folder {str(path.parent)!r} is not there or not writable")


def read_json(path: Path) -> list[Record]:
    """Raises DataError, for a file that is not of ours."""
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
