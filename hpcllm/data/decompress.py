"""Compressed file -> chunks of bytes, in bounded memory: a bomb costs time only.

    .gz .bz2 .xz   at most CHUNK_BYTES a step; a step of .xz in a window of at most XZ_WINDOW_BYTES
    .zst           at most 32 MiB a step, for 1 KiB of input expands at most 32768-fold

A file may hold several streams, one after another. Damage is raised where it is met, after all that is sound.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

import zstandard

CHUNK_BYTES = 2**20
ZSTD_CHUNK_BYTES = 1024
ZSTD_WINDOW_BYTES = 2**31  # what `zstd --long=31` writes, and public dumps do use
XZ_WINDOW_BYTES = 2**28  # `xz -9` needs 65 MiB


class DamagedError(Exception):
    """The compressed stream ends early or does not decode from here on."""


class Decompressor(Protocol):
    """Interface of bz2's and lzma's decompressors, each for one stream."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes: ...


def chunks(file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the contents of a file in pieces. compression: a key of COMPRESSIONS, or ''. Raises DamagedError."""
    yield from COMPRESSIONS[compression](file) if compression else plain(file)


def plain(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        try:
            while chunk := stream.read1(CHUNK_BYTES):
                yield chunk
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DamagedError(str(error)) from error


def _bz2(file: BinaryIO) -> Iterator[bytes]:
    import bz2  # a Python built without it reads everything else

    yield from _streams(file, bz2.BZ2Decompressor, (OSError, ValueError))


def _xz(file: BinaryIO) -> Iterator[bytes]:
    import lzma  # a Python built without it reads everything else

    def new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_WINDOW_BYTES)

    yield from _streams(file, new, (lzma.LZMAError,))


def _streams(file: BinaryIO, new: Callable[[], Decompressor], faults: tuple[type[Exception], ...]) -> Iterator[bytes]:
    """Decompress every stream of a file, at most CHUNK_BYTES a step."""
    stream, data = None, b""
    while data or (data := file.read(CHUNK_BYTES)):
        if stream is None and not (data := data.lstrip(b"\0")):  # zeros may stand between streams of .xz
            continue
        stream = stream or new()
        try:
            yield stream.decompress(data, CHUNK_BYTES)
            while not (stream.needs_input or stream.eof):
                yield stream.decompress(b"", CHUNK_BYTES)
        except faults as error:
            raise DamagedError(str(error)) from error
        data, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream is not None:
        raise DamagedError("ends inside a stream")


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    """Decompress every frame of the file; the library's own stream reader takes a file cut short for its end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    frame = None
    while data := file.read(ZSTD_CHUNK_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise DamagedError(str(error)) from error
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise DamagedError("ends inside a frame")


COMPRESSIONS = {".gz": _gzip, ".zst": _zstd, ".bz2": _bz2, ".xz": _xz}
