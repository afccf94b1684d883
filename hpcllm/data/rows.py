"""Files of many documents that are no lines: JSON arrays, tables as CSV or TSV, Parquet -> (place, row) of each.

    .json       [{"text": "..."}, ...], or one such object    decoded element by element
    .csv .tsv   a first row of names; quotes as in RFC 4180
    .parquet    columns by their names, by pyarrow            a few rows at a time; no more of the file is read

Of tables, a row is a dict of those of the wanted columns that the file has, at least one.

No more than about one element, row or batch is held. What cannot be read ends the file with an UnreadableError, which
says why; the rows in front of it are kept.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from hpcllm.errors import DataError

Faults = tuple[str, str, str]
PARQUET_ROWS = 64  # in a batch
LARGEST_ROW_GROUP_BYTES = 2**31  # of one column: pyarrow may hold as much
_FIRST_BYTES = 2**16
_DECODER = json.JSONDecoder()
_NEAR_END = 16  # characters: a \\u escape, or a word such as `false`, that is cut


class UnreadableError(Exception):
    """The rest of a file is not what its suffix says; `reason` of documents.py is the first argument."""


def json_elements(chunks: Iterable[bytes], largest_bytes: int, not_json: str, too_large: str) -> Iterator[Any]:
    """Yield (number, element) of a JSON array, or (0, object) of a file that holds one."""
    text = _Text(chunks, largest_bytes, not_json, too_large)
    if text.peek() != "[":
        yield 0, text.element()
    else:
        text.place += 1
        number, separator = 0, text.peek()
        while separator != "]":
            yield number, text.element()
            number, separator = number + 1, text.peek()
            if separator not in (",", "]"):
                raise UnreadableError(not_json)
            text.place += separator == ","
        text.place += 1
    if text.peek():
        raise UnreadableError(not_json)


class _Text:
    """Decoded text of a file from `place` on, as far as it was read. Raises UnicodeDecodeError, UnreadableError.

    An element that is cut at the end of what was read is tried again with twice as much, so the time stays linear.
    """

    def __init__(self, chunks: Iterable[bytes], largest_bytes: int, not_json: str, too_large: str) -> None:
        self._chunks, self._largest_bytes = iter(chunks), largest_bytes
        self._not_json, self._too_large = not_json, too_large
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.held, self.place = "", 0

    def peek(self) -> str:
        """Return the next character that is not white space; '' at the end."""
        while True:
            while self.place < len(self.held) and self.held[self.place] in " \t\r\n":
                self.place += 1
            if self.place < len(self.held):
                return self.held[self.place]
            if not self.more():
                return ""

    def element(self) -> Any:
        """Return the JSON value at `place`, behind white space, and step over it."""
        self.peek()
        while True:
            try:
                element, stop = _DECODER.raw_decode(self.held, self.place)
            except RecursionError as error:
                raise UnreadableError(self._not_json) from error
            except ValueError as error:
                self._go_on(error)
                continue
            if stop < len(self.held) or not self.more():  # a number may go on
                if stop - self.place > self._largest_bytes:
                    raise UnreadableError(self._too_large)
                self.place = stop
                return element

    def _go_on(self, error: ValueError) -> None:
        """Read on if an element may only be cut. Raises UnreadableError if it is wrong or too large."""
        place = getattr(error, "pos", 0)
        is_cut = place >= len(self.held) - _NEAR_END or str(error).startswith("Unterminated string")
        if is_cut and len(self.held) - self.place > self._largest_bytes:
            raise UnreadableError(self._too_large) from error
        if not (is_cut and self.more()):
            raise UnreadableError(self._not_json) from error

    def more(self) -> bool:
        """Read on, about as much again as is held, and forget what is done. Returns false at the end."""
        rest, got = self.held[self.place :], 0
        parts, wanted = [rest], max(_FIRST_BYTES, len(rest))
        while got < wanted and (chunk := next(self._chunks, None)) is not None:
            parts.append(self._decoder.decode(chunk))
            got += len(parts[-1])
        if not got:
            self._decoder.decode(b"", final=True)
            return False
        self.held, self.place = "".join(parts), 0
        return True


def csv_rows(
    lines: Iterable[tuple[int, bytes | None]],
    columns: Sequence[str],
    delimiter: str,
    largest_bytes: int,
    faults: Faults,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (number, row) of each row behind the first, which names the columns.

    lines: place and bytes of each, without its end. faults: reasons for no wanted column, a broken row, a large one.
    """
    no_field, broken, too_large = faults
    row_bytes = 0  # so far: a row ends where no quote is open

    def texts() -> Iterator[str]:
        nonlocal row_bytes
        for _, line in lines:
            row_bytes += len(line or b"") + 1  # its end
            if line is None or row_bytes > largest_bytes:
                raise UnreadableError(too_large)
            yield line.decode("utf-8") + "\n"

    csv.field_size_limit(largest_bytes)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    try:
        names = [name.removeprefix("\ufeff") for name in next(reader, [])]
        wanted = [(name, names.index(name)) for name in _wanted(columns, names, no_field)]
        for number, row in enumerate(reader, 1):
            row_bytes = 0
            if len(row) > max(column for _, column in wanted):
                yield number, {name: row[column] for name, column in wanted}
            elif row:
                raise UnreadableError(broken)
    except csv.Error as error:
        raise UnreadableError(broken, str(error)) from error


def parquet_rows(file: BinaryIO, columns: Sequence[str], faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of each row. faults: as of csv_rows."""
    parquet, arrow_error = pyarrow_parquet()
    no_field, broken, too_large = faults
    try:
        table = parquet.ParquetFile(file, pre_buffer=False)
        wanted = _wanted(columns, table.schema_arrow.names, no_field)
        number = 0
        for group in range(table.num_row_groups):
            facts = table.metadata.row_group(group)
            stored = [facts.column(i) for i in range(facts.num_columns)]
            read = (c.total_uncompressed_size for c in stored if c.path_in_schema.partition(".")[0] in wanted)
            if sum(read) > LARGEST_ROW_GROUP_BYTES:
                raise UnreadableError(too_large)
            for batch in table.iter_batches(PARQUET_ROWS, [group], wanted):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (arrow_error, OSError, ValueError, MemoryError) as error:
        raise UnreadableError(broken, str(error)[:200]) from error


def _wanted(columns: Sequence[str], names: Sequence[str], no_field: str) -> list[str]:
    """Return those of the columns that a table has. Raises UnreadableError if there are none."""
    if found := [name for name in columns if name in names]:
        return found
    raise UnreadableError(no_field, f"columns {', '.join(map(repr, names[:8]))}"[:200])


def pyarrow_parquet() -> tuple[Any, type[Exception]]:
    """Import pyarrow on first use. Raises DataError that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(".parquet needs the `pyarrow` library: pip install pyarrow") from error
    return pyarrow.parquet, pyarrow.lib.ArrowException
