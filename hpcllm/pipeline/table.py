"""Text in columns: the first one to the left, the others to the right, each as wide as its widest cell."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """A line for the head and one for each row; a row that ends early has sentences for the reader in its last cell."""
    whole = [head, *(row for row in rows if len(row) == len(head))]
    widths = [max(len(row[k]) for row in whole) for k in range(len(head))]
    return [indent + "   ".join(_pad(cell, widths, k) for k, cell in enumerate(row)).rstrip() for row in [head, *rows]]


def _pad(cell: str, widths: Sequence[int], k: int) -> str:
    return f"{cell:<{widths[k]}}" if k == 0 else f"{cell:>{widths[k]}}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def bytes_text(count: int) -> str:
    """In the largest binary unit of which there is one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
