"""Files of examples: a benchmark's rows in any form that `prepare` reads -> checked examples, or what is wrong where.

    tasks.jsonl, test.parquet, dev.csv, questions.json.gz -- data/documents.py --> rows -- benchmarks.py --> examples

One row that makes no example ends the reading: a task without some of its examples is another task. The message names
the line, or the row. MMLU's tables have no first row of names: question, A, B, C, D, answer. A file may come from
anyone: rows have at most LARGEST_ROW_BYTES, files MOST_EXAMPLES rows.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, cast

from hpcllm.config.input_files import LARGEST_TABLE_BYTES, open_regular, read_text
from hpcllm.data.decompress import chunks
from hpcllm.data.documents import Document, Problem, read_documents
from hpcllm.data.inputs import LINES, ROWS, Unit
from hpcllm.errors import DataError
from hpcllm.evaluation.benchmarks import Format, Item, RejectedError
from hpcllm.evaluation.examples import Example
from hpcllm.evaluation.questions import Question

LARGEST_ROW_BYTES = 4 * 2**20
TOO_LARGE = f"row larger than {LARGEST_ROW_BYTES // 2**20} MiB"
MOST_EXAMPLES = 1_000_000
MMLU_COLUMNS = 6  # of its tables


@dataclass(frozen=True)
class ExampleDocument(Document):
    """A row that makes an example or a question; `text` shows it with its answer."""

    example: Example | Question = field(default_factory=lambda: Example(("",), (" ",)))


@dataclass(frozen=True)
class ExampleRows(Generic[Item]):
    """Reader of rows of one format, for read_documents."""

    format: Format[Item]
    largest_bytes: int = LARGEST_ROW_BYTES
    too_large: str = TOO_LARGE

    @property
    def columns(self) -> tuple[str, ...]:
        return self.format.columns

    def read(self, origin: str, row: Mapping[str, Any], largest_bytes: int) -> Document | Problem:  # noqa: ARG002
        """Make an example of a row. Never raises for what it holds."""
        try:
            example = self.format.read(row)
        except RejectedError as error:
            return Problem(origin, str(error))
        return ExampleDocument(origin, example.shown, example)


def read_examples(path: Path, name: str, formats: Mapping[str, Format[Item]]) -> list[Item]:
    """Read a file of examples or questions. name: of a format in `formats`. Not collective.

    Raises DataError, naming file, line or row and what would be valid, for the first row that makes no example, and for
    a file without any.
    """
    unit = Unit(str(path), 0, size_of(path))
    if unit.kind not in (*LINES, *ROWS):
        raise DataError(f"{str(path)!r} holds no rows; valid: {' '.join((*LINES, *ROWS))}, also with .gz .zst .bz2 .xz")
    found: list[Item] = []
    read = _tables_of_mmlu if name == "mmlu" and unit.kind == ".csv" else _rows
    for each in read(unit, name, formats[name]):
        found.append(each)
        if len(found) > MOST_EXAMPLES:
            raise DataError(f"{str(path)!r} has more than {MOST_EXAMPLES:,} rows; split it")
    if not found:
        raise DataError(f"{str(path)!r} holds no examples")
    return found


def _rows(unit: Unit, name: str, form: Format[Item]) -> Iterator[Item]:
    for each in read_documents(unit, ExampleRows(form)):
        if isinstance(each, Problem):
            hint = f"; valid as {name}: {', '.join(form.columns)}"
            raise DataError(f"{place_of(unit, each.origin)}: {each.reason}{hint}")
        assert isinstance(each, ExampleDocument)
        yield cast(Item, each.example)


def _tables_of_mmlu(unit: Unit, name: str, form: Format[Item]) -> Iterator[Item]:  # noqa: ARG001 - as _rows
    """Read a table without names, as MMLU was published."""
    path = Path(unit.path)
    try:
        rows = list(csv.reader(read_text(path, LARGEST_TABLE_BYTES).splitlines(keepends=True), strict=True))
    except (ValueError, csv.Error) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error
    for number, row in enumerate(rows, 1):
        try:
            if len(row) != MMLU_COLUMNS:
                raise RejectedError(f"{len(row)} columns; valid: question, A, B, C, D, answer")
            facts = {"question": row[0], "choices": row[1:5], "answer": row[5], "subject": path.stem}
            yield form.read(facts)
        except RejectedError as error:
            raise DataError(f"{path} row {number}: {error}") from error


def size_of(path: Path) -> int:
    """Return the bytes of a file that a user names. Raises DataError."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(f"the file {str(path)!r} cannot be read: {error.strerror}") from error


def place_of(unit: Unit, origin: str) -> str:
    """Return the origin of a row with the number of its line in place of its first byte."""
    path, colon, place = origin.rpartition(":")
    start, _, more = place.partition(" ")
    if not (unit.is_jsonl and colon and start.isdigit()):
        return origin
    lines, left = 1, int(start)
    with os.fdopen(open_regular(unit.path), "rb") as file:
        for chunk in chunks(file, unit.compression):
            lines += chunk[:left].count(b"\n")
            left -= min(left, len(chunk))
            if not left:
                break
    return f"{path} line {lines} {more}".rstrip()
