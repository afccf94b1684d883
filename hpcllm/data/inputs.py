"""Inputs of `prepare`: files and folders -> units of work in one global order, shared among the ranks.

    inputs       a.txt      corpus.jsonl (20 MiB)       folder/ (walked, sorted)
    units        [a.txt]    [0..8) [8..16) [16..20)     [docs/b.txt] [folder/c.txt.gz] ...
    ranks        |-------- rank 0 --------|------------ rank 1 ------------|     contiguous, about the same bytes

A unit is a file, or a byte range of a large uncompressed .jsonl, so that one giant file still feeds many ranks. The
ranges have a fixed size: neither units nor their order depend on the number of ranks. A rank gets a contiguous run of
units, so rank order is document order.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from hpcllm.data.decompress import COMPRESSIONS
from hpcllm.data.rows import pyarrow_parquet
from hpcllm.errors import DataError

RANGE_BYTES = 8 * 2**20
LINES = (".jsonl", ".ndjson")  # a document a line
ROWS = (".json", ".csv", ".tsv", ".parquet")  # a document a row
PROSE = ("txt", "text", "md", "markdown", "rst", "tex", "html", "htm", "xml")
SOURCE = ("py", "pyi", "c", "h", "cc", "cpp", "cxx", "hpp", "cu", "hip", "f", "f90", "f95", "jl", "rs", "go", "java")
SCRIPTS = ("js", "ts", "sh", "lua", "tcl", "r", "m", "toml", "yaml", "yml", "cmake")
SUFFIXES = frozenset([*LINES, *ROWS, *(f".{name}" for name in (*PROSE, *SOURCE, *SCRIPTS))])
STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
UNKNOWN_SUFFIX, HIDDEN = "file of unknown suffix", "hidden file or folder"
NOT_REGULAR, UNLISTED = "linked folder or special file", "folder that cannot be listed"


@dataclass(frozen=True)
class Unit:
    """Bytes start..end of one file; `size` of a compressed file is its size on disk."""

    path: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def compression(self) -> str:
        """'.gz', '.zst', '.bz2', '.xz' or ''."""
        suffix = os.path.splitext(self.path)[1].lower()
        return suffix if suffix in COMPRESSIONS else ""

    @property
    def kind(self) -> str:
        """Suffix without that of a compression."""
        return _suffix(self.path)

    @property
    def is_jsonl(self) -> bool:
        return self.kind in LINES


def find_units(inputs: Sequence[Path], skipped: Counter[str], range_bytes: int = RANGE_BYTES) -> list[Unit]:
    """List all units in global order: the order of `inputs`, inside a folder that of the names' bytes at each level.

    Without inputs, the source of the Python standard library. `skipped` counts, by reason, the entries of folders that
    are not read. Raises DataError if an input does not exist or has an unknown suffix, if nothing is left to
    read, or if a library for it is missing.
    """
    paths = [path for given in inputs for path in _files_of(given, skipped)] if inputs else list(_standard_library())
    units = [unit for path in paths for unit in _units_of(path, range_bytes)]
    if any(unit.kind == ".parquet" for unit in units):
        pyarrow_parquet()
    if not units:
        listed = ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "no files at all"
        raise DataError(f"nothing to read in {', '.join(map(repr, map(str, inputs)))}: {listed}; {_known()}")
    return units


def share(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Cut the units into `ranks` contiguous runs of about the same number of bytes."""
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    weights = [unit.size + 1 for unit in units]
    total, before = sum(weights), 0
    for unit, weight in zip(units, weights, strict=True):
        shares[(2 * before + weight) * ranks // (2 * total)].append(unit)
        before += weight
    return shares


def _files_of(given: Path, skipped: Counter[str]) -> Iterator[str]:
    """List the files of one input; a folder is walked. A file that is named may have no suffix, then it is text."""
    try:
        mode = os.stat(given).st_mode
    except OSError as error:
        raise DataError(f"the input {str(given)!r} cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        yield from _walk(str(given), skipped)
    elif stat.S_ISREG(mode):
        if (suffix := _suffix(str(given))) and suffix not in SUFFIXES:
            raise DataError(f"the input {str(given)!r} has the unknown suffix {suffix!r}; {_known()}")
        yield str(given)
    else:
        raise DataError(f"the input {str(given)!r} is neither a file nor a folder")


def _walk(
    folder: str, skipped: Counter[str], suffixes: Set[str] = SUFFIXES, left_out: Set[str] = frozenset()
) -> Iterator[str]:
    """Yield the files of a folder with one of the suffixes, in the order of the names' bytes at each level."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
    except OSError:
        skipped[UNLISTED] += 1
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _walk(entry.path, skipped, suffixes, left_out) if entry.name not in left_out else ()
        elif reason := _reason_to_skip(entry, suffixes):
            skipped[reason] += 1
        else:
            yield entry.path


def _reason_to_skip(entry: os.DirEntry[str], suffixes: Set[str]) -> str:
    """Return why an entry is not read, or ''. A linked folder could make a circle, a named pipe would block."""
    if entry.name.startswith("."):
        return HIDDEN
    # A broken link counts as a file: the reader will name it among the unreadable ones.
    if not os.path.isfile(entry.path) and os.path.exists(entry.path):  # entry.is_file() raises for a link to itself
        return NOT_REGULAR
    return "" if _suffix(entry.name) in suffixes else UNKNOWN_SUFFIX


def _standard_library() -> Iterator[str]:
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise DataError(
            f"this Python keeps no source of its standard library ({root!r}); name files or folders to read"
        )
    yield from _walk(root, Counter(), {".py"}, STDLIB_LEFT_OUT)


def _units_of(path: str, range_bytes: int) -> list[Unit]:
    try:
        size = os.stat(path).st_size
    except OSError:
        size = 0  # the reader will say why
    unit = Unit(path, 0, size)
    if size <= range_bytes or unit.compression or not unit.is_jsonl:
        return [unit]
    return [Unit(path, start, min(start + range_bytes, size)) for start in range(0, size, range_bytes)]


def _suffix(path: str) -> str:
    """Suffix without that of a compression: '.jsonl' of 'a.jsonl.zst'."""
    stem, suffix = os.path.splitext(path)
    return (os.path.splitext(stem)[1] if suffix.lower() in COMPRESSIONS else suffix).lower()


def _known() -> str:
    return f"valid: {' '.join(sorted(SUFFIXES))}, each but .parquet also with {' '.join(COMPRESSIONS)}"
