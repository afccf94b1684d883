"""Sections of ELF files of 64 bits, in which all device compilers hand out machine code."""

from __future__ import annotations

import struct


def sections(code: bytes) -> list[tuple[str, bytes]]:
    """(name, contents) of each section, in the file's order."""
    (table_at,) = struct.unpack_from("<Q", code, 40)
    size, count, names_at = struct.unpack_from("<HHH", code, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", code, table_at + size * index) for index in range(count)]
    names = code[rows[names_at][4] :]
    return [(names[row[0] : names.index(b"\0", row[0])].decode(), code[row[4] : row[4] + row[5]]) for row in rows]
