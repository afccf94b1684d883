"""A run file as it would be run on so many ranks: everything filled in, its schedule proved. Pure.

    RUN.toml --set ...  -->  keys, values, what must fit together  -->  layout for the ranks  -->  vocabulary, of the
    store if the run file does not say it  -->  schedule, proved free of deadlock

`memory`, `layout` and `train --dry-run` begin here; `train` itself does the same steps, with MPI (assemble.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from hpcllm import config as run_file
from hpcllm.config import Config
from hpcllm.errors import ConfigError, DataError
from hpcllm.layout import check_layout, check_vocabulary, custom_text, schedule_of
from hpcllm.pipeline.checker import check
from hpcllm.pipeline.schedules import Schedule

MOST_RANKS = 1 << 22


def planned(path: Path, overrides: Sequence[str], ranks: int | None) -> tuple[Config, Schedule]:
    """A run file for so many ranks (None: those of its mesh), all filled in, and its schedule, checked.

    Without MPI. Raises UserError.
    """
    return proved(read(path, overrides), ranks)


def read(path: Path, overrides: Sequence[str]) -> Config:
    """With the model that the run starts from, if it names one. Raises UserError."""
    config = run_file.load(path, overrides)
    if config.run.start_from:
        from hpcllm.interchange.start import take_model  # torch: only where weights are to be looked at

        config = take_model(config)
    return config


def proved(config: Config, ranks: int | None) -> tuple[Config, Schedule]:
    """The run on so many ranks, all filled in, and its schedule, checked. Raises UserError."""
    if ranks is None:
        ranks = max(config.mesh.dp, 1) * config.mesh.pp * config.mesh.tp
    if not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"{ranks} ranks; valid: 1 to {MOST_RANKS}")
    config = complete(check_layout(config, ranks))
    schedule = schedule_of(config, custom_text(config))
    check(schedule)
    return config, schedule


def complete(config: Config) -> Config:
    """With the vocabulary, of the store if the run file does not say it. Raises UserError."""
    vocabulary = config.model.vocabulary
    if not vocabulary:
        if not config.data.store:
            raise ConfigError("model.vocabulary = 0 takes that of data.store, which is not given; set one of the two")
        vocabulary = _stored_vocabulary(Path(config.data.store))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=vocabulary))
    check_vocabulary(config)
    return config


def _stored_vocabulary(store: Path) -> int:
    """The number alone: to open a store as training does takes MPI, and checks all of it."""
    import h5py  # not needed where the run file says the vocabulary

    try:
        with h5py.File(store, "r", locking=False) as file:
            return int(file.attrs["vocabulary"])
    except Exception as error:  # whatever the library makes of another file
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error  # HDF5 says it longer
        raise DataError(
            f"cannot read the vocabulary of data.store = {str(store)!r}: {why}; give model.vocabulary instead"
        ) from error
