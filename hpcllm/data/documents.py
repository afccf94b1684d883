"""One unit of work -> its documents in normal form; damaged ones are named instead of raised.

    file --decompress--> chunks of bytes --+-- .jsonl: lines --json--> field --+--> Document
                                           `-- else: the whole file -----------'`-> Problem(origin, reason)

Normal form: NFC, '\\n' line ends, no NUL, no white space at the end.

Everything streams: a compressed file is never held whole, and a line or a text file longer than LARGEST_DOCUMENT_BYTES
is dropped before it can fill the memory, so a decompression bomb costs time only. Reading a unit twice gives the same
documents as long as the file stays the same.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from hpcllm.data.inputs import Unit
from hpcllm.system.text import printable_path

LARGEST_DOCUMENT_BYTES = 256 * 2**20
CHUNK_BYTES = 2**20
ZSTD_CHUNK_BYTES = 1024  # zstd expands at most 32768-fold: one step yields at most 32 MiB, even of a bomb
ZSTD_WINDOW_BYTES = 2**31  # what `zstd --long=31` writes, and public dumps do use

UNREADABLE = "file that cannot be read"
DAMAGED = "compressed file damaged or cut short"
NOT_UTF8 = "not UTF-8"
TOO_LARGE = f"larger than {LARGEST_DOCUMENT_BYTES // 2**20} MiB"
NOT_JSON = "line that is not a JSON object"
NO_FIELD = "field missing or not a string"
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


@dataclass(frozen=True)
class Problem:
    origin: str
    reason: str


class _DamagedError(Exception):
    """The compressed stream ends early or does not decode from here on."""


def read_documents(unit: Unit, field: str, largest_bytes: int = LARGEST_DOCUMENT_BYTES) -> Iterator[Document | Problem]:
    """Yield the documents of one unit in order. Never raises for what a file holds or for a file that is gone.

    A .jsonl gives one document a line, the string under `field`; complete lines in front of a damage are kept.
    Any other file is one document, dropped whole if damaged.
    """
    try:
        with open(unit.path, "rb") as file:
            if unit.is_jsonl:
                yield from _lines_as_documents(unit, file, field, largest_bytes)
            else:
                yield _whole_file(unit, file, largest_bytes)
    except OSError as error:
        yield Problem(f"{printable_path(unit.path)} ({error.strerror or error})", UNREADABLE)
    except _DamagedError as error:
        yield Problem(f"{printable_path(unit.path)} ({error})", DAMAGED)


def normalise(text: str) -> str:
    """Return the form in which documents are compared, counted and tokenized; applying it twice changes nothing.

    A carriage return alone stays: it ends a line on no system of today.
    """
    return unicodedata.normalize("NFC", _LINE_END.sub("\n", text.replace("\0", ""))).rstrip()


def _whole_file(unit: Unit, file: BinaryIO, largest_bytes: int) -> Document | Problem:
    data = bytearray()
    for chunk in _chunks(unit, file):
        data += chunk
        if len(data) > largest_bytes:
            return Problem(printable_path(unit.path), TOO_LARGE)
    return _document(printable_path(unit.path), bytes(data))


def _lines_as_documents(unit: Unit, file: BinaryIO, field: str, largest_bytes: int) -> Iterator[Document | Problem]:
    """Lines that begin inside the unit. A line that straddles a cut belongs to the range in which it begins."""
    first = max(unit.start - 1, 0)  # with the byte before, a line that begins exactly at the cut is seen as complete
    file.seek(first)
    inside = unit.start == 0
    for start, line in _lines(_chunks(unit, file), first, largest_bytes):
        if not unit.compression and start >= unit.end:
            return
        if inside and (line is None or line.strip()):
            yield _json_document(f"{printable_path(unit.path)}:{start}", line, field)
        inside = True


def _lines(chunks: Iterable[bytes], start: int, largest_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (byte at which a line begins, the line without its end, or None if it is too long to hold)."""
    parts: list[bytes] = []
    held = length = 0
    for chunk in chunks:
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


def _json_document(origin: str, line: bytes | None, field: str) -> Document | Problem:
    if line is None:
        return Problem(origin, TOO_LARGE)
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return Problem(origin, NOT_UTF8)
    except (ValueError, RecursionError):
        return Problem(origin, NOT_JSON)
    if not isinstance(row, dict):
        return Problem(origin, NOT_JSON)
    value = row.get(field)
    if not isinstance(value, str):
        return Problem(f"{origin} (field {field!r})", NO_FIELD)
    return _document(origin, value.encode("utf-8", "surrogatepass"))  # a lone \ud800 fails there, as it should


def _document(origin: str, data: bytes) -> Document | Problem:
    try:
        text = normalise(data.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(f"{origin} (byte {error.start})", NOT_UTF8)
    return Document(origin, text) if text else Problem(origin, EMPTY)


def _chunks(unit: Unit, file: BinaryIO) -> Iterator[bytes]:
    if unit.compression == ".zst":
        yield from _zstd_chunks(file)
    elif unit.compression == ".gz":
        yield from _gzip_chunks(file)
    else:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        try:
            while chunk := stream.read1(CHUNK_BYTES):
                yield chunk
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _DamagedError(str(error)) from error


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress every frame of the file; the library's own stream reader takes a file cut short for its end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    frame = None
    while data := file.read(ZSTD_CHUNK_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _DamagedError(str(error)) from error
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise _DamagedError("ends inside a frame")
