"""Text for people: tables, sizes, shares and times in few digits, and foreign text made safe to show. Pure.

Names of files and what strangers put into them may hold control characters; `printable` lets none of them steer a
terminal; `harmless` does so for whole texts, as a model makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# control characters but for line end and tab, marks of direction, and what is no Unicode
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes for line ends, control characters and what is not Unicode; everything else as it is."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def harmless(text: str) -> str:
    """Escapes for what steers a terminal or turns the direction of text; line ends, tabs and the rest as they are."""
    return _STEERS.sub(lambda found: ascii(found[0])[1:-1], text)


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


class TableLine(str):
    """Line of a table that knows the whole of it, so that who prints it can lay it out anew for fewer columns."""

    whole: tuple[Sequence[str], Sequence[Sequence[str]], str, int]  # head, rows, indent, columns aligned to the left


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ", gap: str = "   ", left: int = 1
) -> list[str]:
    """Lines of a table: the head, then each row; each column is as wide as its widest cell.

    left: number of columns that are aligned to the left; the others are aligned to the right. A row with fewer cells
    than the head ends in a sentence for the reader, which widens no column.
    """
    full = [row for row in (head, *rows) if len(row) == len(head)]
    widths = [max(map(len, column)) * (-1 if k < left else 1) for k, column in enumerate(zip(*full, strict=True))]
    lines = [TableLine(indent + aligned(row, widths, gap)) for row in (head, *rows)]
    whole = (head, rows, indent, left)  # one object for all lines: they belong together
    for line in lines:
        line.whole = whole
    return list[str](lines)


def stacked(line: TableLine, columns: int) -> list[str]:
    """Lay out a table for so many columns: a smaller gap, or else parts, one under the other, with the first column."""
    head, rows, indent, left = line.whole
    lines = table(head, rows, indent, "  ", left)
    if max(map(len, lines)) <= columns or len(head) < 3:
        return lines
    widths = [max(len(row[place]) for row in (head, *rows) if len(row) == len(head)) for place in range(len(head))]
    parts: list[list[int]] = [[0]]
    for place in range(1, len(head)):
        if len(parts[-1]) > 1 and len(indent) + sum(widths[k] + 2 for k in [*parts[-1], place]) - 2 > columns:
            parts.append([0])
        parts[-1].append(place)
    found: list[str] = []
    for number, part in enumerate(parts):
        full = [row for row in rows if len(row) == len(head) or not number]  # a sentence instead of cells comes once
        cut = [[row[k] for k in part] if len(row) == len(head) else row for row in full]
        found += [""] * (number > 0) + table([head[k] for k in part], cut, indent, "  ", left)
    return found


def narrowed(
    head: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str], columns: int, indent: int = 2, gap: int = 3
) -> tuple[list[str], list[list[str]]]:
    """Leave out columns, in the order of `drop`, until the table has no more than so many characters a line.

    A row with fewer cells than the head ends in a sentence and stays as it is.
    """
    whole = [row for row in (head, *rows) if len(row) == len(head)]
    widths = dict(zip(head, (max(map(len, column)) for column in zip(*whole, strict=True)), strict=True))
    for title in drop:
        if indent + sum(widths.values()) + gap * (len(widths) - 1) > columns:
            widths.pop(title, None)
    kept = [place for place, title in enumerate(head) if title in widths]
    shorter = [[row[place] for place in kept] if len(row) == len(head) else list(row) for row in rows]
    return [head[place] for place in kept], shorter


def fitted(parts: Sequence[str], drop: Sequence[int], columns: int, gap: str = "  ") -> str:
    """Join parts to a line; leave out those at the places of `drop`, in this order, until it fits in the columns.

    Empty parts are left out. columns: 0 leaves out none.
    """
    left = dict(enumerate(parts))
    for place in drop if columns else ():
        if len(gap.join(filter(None, left.values()))) > columns:
            del left[place]
    return gap.join(filter(None, left.values()))


def aligned(cells: Sequence[str], widths: Sequence[int], gap: str = "  ") -> str:
    """One line of a table whose rows are not all known yet. widths: negative where a column is aligned to the left."""
    padded = (
        f"{text:<{-width}}" if width < 0 else f"{text:>{width}}" for text, width in zip(cells, widths, strict=False)
    )
    return gap.join(padded).rstrip()
