"""Text from elsewhere, made fit to be shown: names of files and what strangers put into them steer no terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escapes for line ends, control characters and what is not Unicode; everything else as it is."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_path(path: str) -> str:
    """The same of a path, whose bytes need not be UTF-8: '\\xff' for such a byte."""
    return "".join(f"\\x{ord(c) - 0xDC00:02x}" if "\udc80" <= c <= "\udcff" else printable(c) for c in path)


def size_text(count: float) -> str:
    """'14.2 MB': bytes in three digits and a unit of a thousand."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
