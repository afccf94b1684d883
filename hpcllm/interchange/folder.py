"""A folder of weights as Hugging Face has it, read like a checkpoint: any box of any parameter, on any rank.

rank 0   contents.read_contents --+
all                               +--> where each tensor lies --> boxes of theirs that are my slab --> pread
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from hpcllm.checkpoint.layout import MODEL, STORED_AS, DatasetSpec, as_bytes
from hpcllm.checkpoint.locate import locate
from hpcllm.checkpoint.slabs import Slab, runs
from hpcllm.errors import DataError
from hpcllm.interchange.contents import CONFIG, TOKENIZER_FILE, Contents, open_file, read_at, read_contents
from hpcllm.interchange.safetensors import DTYPES, Entry
from hpcllm.model.shapes import parameter_shapes
from hpcllm.together import on_root

if TYPE_CHECKING:
    from mpi4py import MPI


def which(path: Path) -> tuple[Path, bool]:
    """A Hugging Face folder, and True; or the checkpoint that the path names (locate.py), and False.

    Not collective. Raises DataError if it is neither, CheckpointError.
    """
    if (path / CONFIG).is_file():
        return path, True
    try:
        return locate(path), False
    except DataError as error:
        neither = f"{path} has no {CONFIG}, so it is no Hugging Face folder; and " if path.is_dir() else ""
        raise DataError(f"{neither}{error}") from error


class Folder:
    """An open folder; close it, or use it in a `with` statement. Reading is not collective."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path = path
        self.kind, self.model, self.texts, self.notes = contents.kind, contents.model, contents.texts, contents.notes
        self._places, self._entries = contents.places, contents.entries
        self._shapes = parameter_shapes(contents.model)
        self._descriptors: dict[str, int] = {}
        self.specs: dict[str, DatasetSpec] = {  # as in a checkpoint: model/<parameter>
            f"{MODEL}/{name}": DatasetSpec(shape, DTYPES[self._entry(name).dtype])
            for name, shape in self._shapes.items()
        }

    @classmethod
    def open(cls, path: Path, comm: MPI.Intracomm | None = None) -> Folder:
        """Check all but the tensors, on rank 0. Collective over comm. Raises InterchangeError on all ranks."""
        return cls(path, on_root(comm, lambda: read_contents(path)))

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer_json(self) -> str:
        return self.texts.get(TOKENIZER_FILE, "")

    def read(self, slab: Slab) -> np.ndarray:
        """A slab of model/<parameter>, in its shape and the stored type (bfloat16 as uint16). Not collective.

        Raises InterchangeError if a file cannot be read.
        """
        name = slab.dataset.removeprefix(f"{MODEL}/")
        place, entry = self._places[name], self._entry(name)
        values = np.empty(slab.shape, dtype=STORED_AS[DTYPES[entry.dtype]])
        for theirs, rows in place.boxes(slab, self._shapes[name]):
            if place.transposed:
                turned = np.empty(theirs.shape, dtype=values.dtype)
                self._fill(as_bytes(turned), theirs)
                values[rows] = turned.T
            else:
                self._fill(as_bytes(values[rows]), theirs)
        return values

    def _entry(self, name: str) -> Entry:
        return self._entries[self._places[name].name][1]

    def _fill(self, out: memoryview, slab: Slab) -> None:
        file, entry = self._entries[slab.dataset]
        if file not in self._descriptors:
            self._descriptors[file] = open_file(self.path / file)
        done = 0
        for offset, length in runs(slab, entry.shape, STORED_AS[DTYPES[entry.dtype]].itemsize):
            read_at(self._descriptors[file], out[done : done + length], entry.offset + offset, self.path / file)
            done += length
