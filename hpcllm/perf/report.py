"""Where records go as they come: rows on standard output, the JSON file, the picture at the end.

Rows and file are complete after each size, so a measurement that is cut off leaves what it has found. With --json - the
rows go to standard error, and standard output is JSON alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpi4py import MPI
from tqdm import tqdm

from hpcllm.perf import table
from hpcllm.perf.arguments import Options
from hpcllm.perf.records import STANDARD_OUTPUT, Record, check_writable, to_json, write_json
from hpcllm.together import on_root


class Report:
    """Collective over comm, where only rank 0 writes. Raises ConfigError for files that cannot be written."""

    def __init__(self, options: Options, comm: MPI.Intracomm, sizes: int) -> None:
        self._options, self._comm = options, comm
        self.records: list[Record] = []
        on_root(comm, lambda: check_writable(options.json, options.plot))
        hidden = comm.rank > 0 or not sys.stderr.isatty()
        self._bar = tqdm(total=sizes, unit="size", leave=False, disable=hidden, file=sys.stderr)

    def say(self, text: str) -> None:
        if self._comm.rank == 0:
            to_stderr = self._options.json == STANDARD_OUTPUT
            tqdm.write(text, file=sys.stderr if to_stderr else sys.stdout)
            sys.stdout.flush()

    def add(self, records: Sequence[Record]) -> None:
        """The records of one size."""
        if records and not self.records:
            self.say(table.head(table.columns_of(records[0])))
        self.records += records
        for record in records:
            self.say(table.row(record))
        on_root(self._comm, self._save)
        self._bar.update()

    def close(self) -> None:
        """Draw; with --json - print."""
        self._bar.close()
        on_root(self._comm, self._finish)

    def _save(self) -> None:
        if self._options.json and self._options.json != STANDARD_OUTPUT:
            write_json(self._options.json, self.records)

    def _finish(self) -> None:
        self._save()
        if self._options.json == STANDARD_OUTPUT:
            print(to_json(self.records), end="", flush=True)
        if self._options.plot and self.records:
            from hpcllm.perf.picture import draw

            draw(self.records, self._options.plot)
