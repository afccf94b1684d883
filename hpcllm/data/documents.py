"""One unit of work -> its documents in normal form; damaged ones are named instead of raised.

    file --decompress.py--> chunks of bytes --+-- .jsonl: lines --json--> row ---+--> Document
                                              +-- .json .csv .tsv: rows.py, row -+--> Problem(origin, reason)
         --pyarrow--> rows ---------- .parquet+                                  |
                                              `-- else: the whole file ----------'

A reader of rows takes the text of one field (TextRows), or makes a chat of several (chat.py).

Normal form: NFC, '\\n' line ends, no NUL, no white space at the end.

Everything streams: a compressed file is never held whole, and a line or a text file longer than its reader allows is
dropped before it can fill the memory, so a decompression bomb costs time only. Reading a unit twice gives the same
documents as long as the file stays the same.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from hpcllm.config.input_files import open_regular
from hpcllm.data.decompress import DamagedError, chunks
from hpcllm.data.inputs import ROWS, Unit
from hpcllm.data.rows import UnreadableError, csv_rows, json_elements, parquet_rows
from hpcllm.system.text import printable_path

LARGEST_DOCUMENT_BYTES = 256 * 2**20

UNREADABLE = "file that cannot be read"
DAMAGED = "compressed file damaged or cut short"
NOT_UTF8 = "not UTF-8"
TOO_LARGE = f"larger than {LARGEST_DOCUMENT_BYTES // 2**20} MiB"
NOT_JSON = "line that is not a JSON object"
NOT_JSON_FILE = "no JSON array of objects from there on"
NO_FIELD = "field missing or not a string"
BROKEN_ROW = "table that breaks off"
NO_COLUMN = "table without the field"
NO_ROWS = "file that holds no rows"
EMPTY = "empty"
_LINE_END = re.compile(r"\r+\n")


@dataclass(frozen=True)
class Document:
    """Normalised text of at least one character. `origin` is a path, and for a line of a file ':byte' of its start."""

    origin: str
    text: str

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode("utf-8"))

    @property
    def kind(self) -> str:
        """Kind of the store that it goes into."""
        return "text"

    @property
    def identity(self) -> str:
        """Everything by which two documents can differ."""
        return self.text


@dataclass(frozen=True)
class Problem:
    origin: str
    reason: str


class RowReader(Protocol):
    """A way to make a document of a row. columns: of tables, those to be read.

    largest_bytes: of a row, and of a text; too_large: the reason by which larger ones are dropped.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def largest_bytes(self) -> int: ...

    @property
    def too_large(self) -> str: ...

    def read(self, origin: str, row: Mapping[str, Any], largest_bytes: int) -> Document | Problem: ...


@dataclass(frozen=True)
class TextRows:
    """Reader of rows whose text stands in one field."""

    field: str
    largest_bytes: int = LARGEST_DOCUMENT_BYTES
    too_large: str = TOO_LARGE

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, origin: str, row: Mapping[str, Any], largest_bytes: int) -> Document | Problem:
        """Make a document of the field."""
        value = row.get(self.field)
        if not isinstance(value, str):
            return Problem(f"{origin} (field {self.field!r})", NO_FIELD)
        data = value.encode("utf-8", "surrogatepass")  # a lone \ud800 fails in _document, as it should
        return _document(origin, data) if len(data) <= largest_bytes else Problem(origin, TOO_LARGE)


def read_documents(unit: Unit, rows: RowReader, largest_bytes: int = 0) -> Iterator[Document | Problem]:
    """Yield the documents of one unit in order. Never raises for what a file holds or for a file that is gone.

    A .jsonl gives one document a line, a .json one an element, tables one a row; what is complete in front of a damage
    is kept. Any other file is one document of text, dropped whole if damaged; of other readers than TextRows none.
    largest_bytes: 0 for what the reader allows.
    """
    largest_bytes = largest_bytes or rows.largest_bytes
    try:
        with os.fdopen(_open(unit.path), "rb") as file:
            if unit.is_jsonl:
                yield from _lines_as_documents(unit, file, rows, largest_bytes)
            elif unit.kind in ROWS:
                yield from _rows_as_documents(unit, file, rows, largest_bytes)
            elif isinstance(rows, TextRows):
                yield _whole_file(unit, file, largest_bytes)
            else:
                yield Problem(printable_path(unit.path), NO_ROWS)
    except OSError as error:
        yield Problem(f"{printable_path(unit.path)} ({error.strerror or error})", UNREADABLE)
    except DamagedError as error:
        yield Problem(f"{printable_path(unit.path)} ({error})", DAMAGED)


def _open(path: str) -> int:
    """Open a regular file; what was one when the folders were listed may since be a pipe. Raises OSError."""
    try:
        return open_regular(path)
    except ValueError as error:
        raise OSError("no longer a regular file") from error


def normalise(text: str) -> str:
    """Return the form in which documents are compared, counted and tokenized; applying it twice changes nothing.

    A carriage return alone stays: it ends a line on no system of today.
    """
    return unicodedata.normalize("NFC", unified(text)).rstrip()


def unified(text: str) -> str:
    """Return the text with one kind of line end and without NUL."""
    return _LINE_END.sub("\n", text.replace("\0", ""))


def _whole_file(unit: Unit, file: BinaryIO, largest_bytes: int) -> Document | Problem:
    data = bytearray()
    for chunk in chunks(file, unit.compression):
        data += chunk
        if len(data) > largest_bytes:
            return Problem(printable_path(unit.path), TOO_LARGE)
    return _document(printable_path(unit.path), bytes(data))


def _lines_as_documents(
    unit: Unit, file: BinaryIO, rows: RowReader, largest_bytes: int
) -> Iterator[Document | Problem]:
    """Lines that begin inside the unit. A line that straddles a cut belongs to the range in which it begins."""
    first = max(unit.start - 1, 0)  # with the byte before, a line that begins exactly at the cut is seen as complete
    file.seek(first)
    inside = unit.start == 0
    for start, line in _lines(chunks(file, unit.compression), first, largest_bytes):
        if not unit.compression and start >= unit.end:
            return
        if inside and (line is None or line.strip()):
            yield _json_document(f"{printable_path(unit.path)}:{start}", line, rows)
        inside = True


def _rows_as_documents(unit: Unit, file: BinaryIO, rows: RowReader, largest_bytes: int) -> Iterator[Document | Problem]:
    """Rows of a file that is read whole; the origin of one is the path and ':row N'."""
    path = printable_path(unit.path)
    try:
        for number, row in _rows(unit, file, rows, largest_bytes):
            yield rows.read(f"{path}:row {number}", row, largest_bytes)
    except UnreadableError as error:
        yield Problem(" ".join([path, *(f"({why})" for why in error.args[1:])]), error.args[0])
    except UnicodeDecodeError:
        yield Problem(path, NOT_UTF8)


def _rows(unit: Unit, file: BinaryIO, rows: RowReader, largest_bytes: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, row), whose values may be of any type."""
    faults = (NO_COLUMN, BROKEN_ROW, rows.too_large)
    if unit.kind == ".parquet":
        yield from parquet_rows(file, rows.columns, faults)
        return
    parts = chunks(file, unit.compression)
    if unit.kind == ".json":
        for number, element in json_elements(parts, largest_bytes, NOT_JSON_FILE, rows.too_large):
            yield number, element if isinstance(element, dict) else {}
    else:
        lines = _lines(parts, 0, largest_bytes)
        yield from csv_rows(lines, rows.columns, "\t" if unit.kind == ".tsv" else ",", largest_bytes, faults)


def _lines(parts_read: Iterable[bytes], start: int, largest_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (byte at which a line begins, the line without its end, or None if it is too long to hold)."""
    parts: list[bytes] = []
    held = length = 0
    for chunk in parts_read:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            length += len(piece)
            yield start, (b"".join([*parts, piece]) if length <= largest_bytes else None)
            start += length + 1
            parts, held, length = [], 0, 0
        length += len(rest)
        if held + len(rest) <= largest_bytes:
            parts.append(rest)
            held += len(rest)
    if length:
        yield start, (b"".join(parts) if length <= largest_bytes else None)


def _json_document(origin: str, line: bytes | None, rows: RowReader) -> Document | Problem:
    if line is None:
        return Problem(origin, rows.too_large)
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return Problem(origin, NOT_UTF8)
    except (ValueError, RecursionError):
        return Problem(origin, NOT_JSON)
    if not isinstance(row, dict):
        return Problem(origin, NOT_JSON)
    return rows.read(origin, row, len(line))


def _document(origin: str, data: bytes) -> Document | Problem:
    try:
        text = normalise(data.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(f"{origin} (byte {error.start})", NOT_UTF8)
    return Document(origin, text) if text else Problem(origin, EMPTY)
