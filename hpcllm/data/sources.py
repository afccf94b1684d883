"""Sources of a store: which of its documents came from which folder, told in a few words.

    prepare wiki/ code/ more/wiki.txt     each input is a source, of a file the folder that it lies in

    documents of a split      a a a a b b c        in the order of the inputs, whatever the number of ranks
    runs                      ("wiki", 4) ("code", 2) ("more", 1)

A store of one source says nothing of it. Two folders of one name are told apart by their paths.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcllm.errors import CheckpointError

Flags = NDArray[np.bool_]
MOST_RUNS = 1000  # a store of more says nothing of them
LONGEST_NAME = 200  # characters


class Run(NamedTuple):
    """Documents of one source that follow one another in each split."""

    name: str
    train: int
    validation: int


def name_inputs(inputs: Sequence[Path]) -> dict[str, str]:
    """Return the source of each input, by its path as it was given."""
    folders = {str(each): os.path.abspath(each if each.is_dir() else each.parent) for each in inputs}
    named = Counter(os.path.basename(folder) for folder in set(folders.values()))
    short = {folder: os.path.basename(folder) for folder in folders.values()}
    return {
        given: (short[folder] if named[short[folder]] == 1 and short[folder] else folder)[-LONGEST_NAME:]
        for given, folder in folders.items()
    }


def source_of(path: str, names: Mapping[str, str]) -> str:
    """Return the source of a file that was found in one of the inputs."""
    given = max((each for each in names if path == each or path.startswith(each.rstrip("/") + "/")), key=len)
    return names[given]


def joined(runs: Iterable[Run]) -> list[Run]:
    """Join neighbours of one source, without those of no document."""
    there = (run for run in runs if run.train or run.validation)
    return [
        Run(name, sum(each.train for each in part), sum(each.validation for each in part))
        for name, part in ((name, list(group)) for name, group in groupby(there, lambda run: run.name))
    ]


def to_text(runs: Sequence[Run]) -> str:
    """Write runs as an attribute of a store."""
    return json.dumps(runs)


def from_text(text: Any, train: int, validation: int) -> list[Run]:
    """Read runs that make up so many documents; "" is none. Raises CheckpointError."""
    try:
        found = [Run(*each) for each in json.loads(str(text) or "[]")]
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its sources cannot be read: {str(error)[:80]}") from error
    if len(found) > MOST_RUNS or not all(map(_is_sound, found)):
        raise CheckpointError("its sources are no list of names and numbers of documents")
    if found and (sum(run.train for run in found), sum(run.validation for run in found)) != (train, validation):
        raise CheckpointError("its sources tell of another number of documents")
    return found


def _is_sound(run: Run) -> bool:
    counts = (run.train, run.validation)
    return (
        isinstance(run.name, str) and len(run.name) <= LONGEST_NAME and all(type(n) is int and n >= 0 for n in counts)
    )


def tally(files: Iterable[tuple[str, int]], stays: Flags, validation: Flags, names: Mapping[str, str]) -> Iterator[Run]:
    """Yield the runs of a rank's files. names: of name_inputs.

    files: (path, documents read of it), in order; stays, validation: (documents,), of all of them.
    """
    end = 0
    for path, count in files:
        first, end = end, end + count
        kept = stays[first:end]
        held_out = int((kept & validation[first:end]).sum())
        yield Run(source_of(path, names), int(kept.sum()) - held_out, held_out)
