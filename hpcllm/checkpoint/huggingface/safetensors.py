"""The safetensors format: read the places of a file's tensors, unbelieved until checked, or lay them out. Pure.

    8 bytes        header bytes            buffer
    | length n | {"w": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]}, ...} | w ... | b ... |
      uint64                               offsets count from here ----------------------^

Nothing in it can run code, and all there is to trust is numbers: each is checked before it is used. The format
is small enough that its own library would save few lines, and would need all tensors of a file in memory to write one.
Source: the format's description in github.com/huggingface/safetensors, README.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from hpcllm.checkpoint.layout import DatasetSpec
from hpcllm.errors import HuggingFaceError
from hpcllm.system.text import printable

# name in the header -> ours, and bytes of an element; the others are known so that their tensors can be passed over
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_HEADER_NAMES = {ours: theirs for theirs, ours in DTYPES.items()} | {"int8": "I8", "int32": "I32", "int64": "I64"}
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER_BYTES = 100_000_000  # as the format's own library has it
_MOST_DIMS = 8
_ALIGN_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str  # as the header has it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]


def read_header(file: BinaryIO, file_bytes: int) -> dict[str, Entry]:
    """Name -> tensor, of an open file. Raises HuggingFaceError for whatever no writer of the format would make."""
    start = file.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        raise HuggingFaceError(f"has {len(start)} bytes; a safetensors file begins with 8 for the length of its header")
    (length,) = _LENGTH.unpack(start)
    if not 2 <= length <= min(_LARGEST_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise HuggingFaceError(
            f"claims a header of {length} bytes, but has {file_bytes} in all; it is cut or no such file"
        )
    try:
        table = json.loads(file.read(length).decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError(f"has a header that is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise HuggingFaceError(f"has a header that is a {type(table).__name__}, not a table of tensors")
    first = _LENGTH.size + length
    entries = {name: _entry(name, item, first) for name, item in table.items() if name != _METADATA}
    _check_extents(entries, first, file_bytes)
    return entries


def lay_out(specs: Mapping[str, DatasetSpec]) -> tuple[bytes, dict[str, int]]:
    """Lay out a file for these tensors: its first bytes, up to the buffer, and the offset of each in the file.

    In the order of the format's own library, the widest types first, then by name, so that its file is ours.
    """
    named = sorted(specs.items(), key=lambda item: (-_ITEM_BYTES[_HEADER_NAMES[item[1].dtype]], item[1].dtype, item[0]))
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}  # transformers asks which framework's layout it is
    end, begins = 0, {}
    for name, spec in named:
        begins[name], end = end, end + spec.bytes
        table[name] = {
            "dtype": _HEADER_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    header = _LENGTH.pack(len(text)) + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        double = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{double!r} is there twice")
    return table


def _entry(name: str, item: Any, first: int) -> Entry:
    fields = item if isinstance(item, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    is_whole = _whole_numbers(shape) and _whole_numbers(offsets) and len(offsets) == 2
    shown = printable(name[:200])
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES or not is_whole:
        told = printable(str(item)[:200])
        raise HuggingFaceError(f"describes {shown!r} as {told}; valid: dtype, shape and data_offsets")
    entry = Entry(dtype, tuple(shape), first + offsets[0])
    if entry.bytes != offsets[1] - offsets[0]:
        raise HuggingFaceError(
            f"gives {shown!r} bytes {offsets[0]} to {offsets[1]}, but {dtype} {entry.shape} has {entry.bytes}"
        )
    return entry


def _whole_numbers(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > _MOST_DIMS:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_extents(entries: Mapping[str, Entry], first: int, file_bytes: int) -> None:
    """Raises HuggingFaceError unless each byte of the buffer is of exactly one tensor."""
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end:
            what = "overlaps another" if entry.offset < end else f"leaves {entry.offset - end} bytes before it to none"
            raise HuggingFaceError(f"has the tensor {printable(name)!r} where it {what}")
        end += entry.bytes
    if end != file_bytes:
        raise HuggingFaceError(f"has {file_bytes} bytes, but its tensors end at {end}; it is cut, or more than it says")
