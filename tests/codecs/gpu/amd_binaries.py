"""What kernels take, by the notes in machine code for AMD's devices.

    ELF file --note of type 32, owner "AMDGPU"--> a map in MessagePack --"amdhsa.kernels"--> a map a kernel

Sources: LLVM, "User Guide for AMDGPU Backend", code object metadata; the MessagePack specification. Only what
compilers write there is read: maps, lists, strings, whole numbers, true and false.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from elf import sections

METADATA = 32  # the type of the note
LENGTHS = {0xD9: (">B", str), 0xDA: (">H", str), 0xDC: (">H", list), 0xDE: (">H", dict)}
NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
WORDS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpacked(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Return the value that begins at `at`, and where it ends. Raises ValueError for what is none of the above."""
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return (tag ^ 0x80) - 0x80 if tag >= 0xE0 else tag, at
    if tag in WORDS:
        return WORDS[tag], at
    if tag in NUMBERS:
        return struct.unpack_from(NUMBERS[tag], data, at)[0], at + struct.calcsize(NUMBERS[tag])
    if tag in LENGTHS:
        form, kind = LENGTHS[tag]
        (size,), at = struct.unpack_from(form, data, at), at + struct.calcsize(form)
    elif tag < 0xC0:
        kind, size = (dict, tag & 15) if tag < 0x90 else (list, tag & 15) if tag < 0xA0 else (str, tag & 31)
    else:
        raise ValueError(f"byte {tag:#x} of MessagePack at {at - 1}")
    return _content(kind, size, data, at)


def _content(kind: type, size: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind is str:
        return data[at : at + size].decode(), at + size
    found = []
    for _ in range(size * (2 if kind is dict else 1)):
        value, at = unpacked(data, at)
        found.append(value)
    return (dict(zip(found[::2], found[1::2], strict=True)) if kind is dict else found), at


def notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """(owner, type, contents) of each note of a section; owner and contents are filled up to a multiple of 4."""
    at = 0
    while at + 12 <= len(data):
        name_bytes, content_bytes, kind = struct.unpack_from("<III", data, at)
        name_at = at + 12
        content_at = name_at + (name_bytes + 3 & ~3)
        yield data[name_at : name_at + name_bytes].rstrip(b"\0"), kind, data[content_at : content_at + content_bytes]
        at = content_at + (content_bytes + 3 & ~3)


def kernels(code: bytes) -> dict[str, dict[str, int]]:
    """What each kernel of a file takes: parameters; of a lane vector registers, bytes of stack, and spills."""
    found = [data for name, section in sections(code) if name.startswith(".note") for data in notes(section)]
    (metadata,) = [content for owner, kind, content in found if (owner, kind) == (b"AMDGPU", METADATA)]
    return {kernel[".name"]: _needs(kernel) for kernel in unpacked(metadata)[0]["amdhsa.kernels"]}


def _needs(kernel: dict[str, Any]) -> dict[str, int]:
    own = [argument for argument in kernel[".args"] if not argument[".value_kind"].startswith("hidden_")]
    return {
        "parameters": len(own),
        "registers": kernel[".vgpr_count"],
        "vector_spills": kernel[".vgpr_spill_count"],
        "scalar_spills": kernel[".sgpr_spill_count"],
        "stack_bytes": kernel[".private_segment_fixed_size"],
    }
