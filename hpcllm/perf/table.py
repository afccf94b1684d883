"""Records as text: a row each, in columns whose width does not change as rows come; and the same as Markdown. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hpcllm.perf.records import Record

Column = tuple[str, int, Callable[[Record], str]]  # title, width, what it shows

_TIMES: list[Column] = [
    ("median", 8, lambda record: seconds(record.median_s)),
    ("min", 8, lambda record: seconds(record.min_s)),
    ("max", 8, lambda record: seconds(record.max_s)),
    ("spread", 6, lambda record: percent(record.spread)),
]
_QUALITY: list[Column] = [
    ("rel error", 9, lambda record: error_text(record.rel_error)),
    ("ratio", 5, lambda record: f"{record.ratio:.2f}"),
]
_NAMES: list[Column] = [
    ("bytes", 6, lambda record: size_text(record.bytes)),
    ("algorithm", -19, lambda record: record.algorithm),
    ("codec", -11, lambda record: record.codec),
]
TRANSFER = [
    *_NAMES,
    *_TIMES,
    ("algbw GB/s", 10, lambda record: rate(record.algbw_gb_s)),
    ("busbw GB/s", 10, lambda record: rate(record.busbw_gb_s)),
    ("of bound", 8, lambda record: percent(record.of_bound)),
    *_QUALITY,
    ("chosen", -1, lambda record: record.chosen),
]
CODEC = [
    *_NAMES,
    ("threads", 7, lambda record: str(record.threads)),
    *_TIMES,
    ("values GB/s", 11, lambda record: rate(record.algbw_gb_s)),
    ("moved GB/s", 10, lambda record: rate(record.moved_gb_s)),
    ("of memcpy", 9, lambda record: percent(record.memcpy_share)),
    *_QUALITY,
]


def columns_of(record: Record) -> list[Column]:
    return CODEC if record.operation == "codec" else TRANSFER


def head(columns: Sequence[Column]) -> str:
    return "  ".join(_pad(title, width) for title, width, _ in columns).rstrip()


def row(record: Record) -> str:
    return "  ".join(_pad(show(record), width) for _, width, show in columns_of(record)).rstrip()


def markdown(records: Sequence[Record]) -> str:
    """One table for each run (operation, ranks, library ...) among the records, in the order in which they come."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(run_title(record), []).append(record)
    return "\n".join(_markdown_run(title, rows) for title, rows in runs.items())


def run_title(record: Record) -> str:
    """What the rows of one table have in common."""
    ranks = f"{record.ranks} rank{'s' * (record.ranks > 1)} on {record.nodes} node{'s' * (record.nodes > 1)}"
    apart = [word for word in (record.device, record.memory) if word not in ("cpu", "private")]
    return ", ".join([record.operation, record.dtype, ranks, *apart, record.library])


def _markdown_run(title: str, records: Sequence[Record]) -> str:
    columns = columns_of(records[0])
    lines = [f"### {title}", "", _line([name for name, _, _ in columns])]
    lines.append(_line(["---" if width < 0 else "---:" for _, width, _ in columns]))
    lines += [_line([show(record) for _, _, show in columns]) for record in records]
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _pad(text: str, width: int) -> str:
    return f"{text:>{width}}" if width > 0 else f"{text:<{-width}}"


def size_text(size_bytes: int) -> str:
    """65536 -> '64K': what --sizes reads."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


def seconds(value_s: float) -> str:
    """Four digits and the unit that suits them."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value_s < 1000 * scale:
            return f"{_digits(value_s / scale)} {unit}"
    return f"{_digits(value_s)} s"


def rate(value_gb_s: float | None) -> str:
    return "" if value_gb_s is None else _digits(value_gb_s)


def error_text(rel_error: float | None) -> str:
    return "not finite" if rel_error is None else f"{rel_error:.1e}" if rel_error else "0"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _digits(value: float) -> str:
    """Three digits that count, never an exponent."""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{min(max(decimals, 0), 9)}f}"
