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


def counted(count: int, word: str) -> str:
    """'1 rank', '3 ranks'."""
    return f"{count} {word}{'' if count == 1 else 's'}"


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
    widths = [max(map(len, column)) * (-1 if k < left else 1) for k, column in enumerate(zip(*whole, strict=True))]
    return [indent + aligned(row, widths, gap) for row in (head, *rows)]


def aligned(cells: Sequence[str], widths: Sequence[int], gap: str = "  ") -> str:
    """One line of a table whose rows are not all known yet. widths: negative where a column is aligned to the left."""
    padded = (
        f"{text:<{-width}}" if width < 0 else f"{text:>{width}}" for text, width in zip(cells, widths, strict=False)
    )
    return gap.join(padded).rstrip()
