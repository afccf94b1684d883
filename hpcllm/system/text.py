"""Text for people: tables, sizes, shares and times in few digits, and foreign text made safe to show. Pure.

Names of files and what strangers put into them may hold control characters; `printable` lets none of them steer a
terminal.
"""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Escapes for line ends, control characters and what is not Unicode; everything else as it is."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_path(path: str) -> str:
    """Escape a path likewise; its bytes need not be UTF-8: '\\xff' stands for one that is not."""
    return "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else printable(c) for c in path)


def size_text(count: float) -> str:
    """'14.2 MB': bytes in three digits and a unit of a thousand."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def binary_size_text(count: float) -> str:
    """'4 MiB': bytes in the largest binary unit of which there is at least one, four digits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def percent(share: float, decimals: int = 1) -> str:
    """'12.5 %' for 0.125."""
    return f"{100 * share:.{decimals}f} %"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ", gap: str = "   ", left: int = 1
) -> list[str]:
    """Lines of a table: the head, then each row; each column is as wide as its widest cell.

    left: number of columns that are aligned to the left; the others are aligned to the right. A row with fewer cells
    than the head ends in a sentence for the reader, which widens no column.
    """
    whole = [row for row in (head, *rows) if len(row) == len(head)]
    widths = [max(len(row[k]) for row in whole) for k in range(len(head))]

    def cell(text: str, k: int) -> str:
        return f"{text:<{widths[k]}}" if k < left else f"{text:>{widths[k]}}"

    return [indent + gap.join(cell(text, k) for k, text in enumerate(row)).rstrip() for row in (head, *rows)]
