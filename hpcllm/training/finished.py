"""Record of a run that has made its last step and saved it: the file `finished` in its run folder.

    last step saved --> record beside, renamed --> exit code 0
    `train` makes steps again (run.steps raised, checkpoint lost) --> record removed
    --restart --> the whole folder is renamed, and the record with it

An exit code is the launcher's word, and a launcher can be wrong: Open MPI's mpirun ends with 0 when it loses a host. So
loops, job scripts and a requeued job ask for this record, `hpcllm train RUN.toml --is-finished`. Imports neither torch
nor mpi4py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hpcllm.config.input_files import read_bytes
from hpcllm.errors import HpcllmError
from hpcllm.system.output import write_whole

NAME = "finished"
MOST_BYTES = 4096  # a record is one short line


@dataclass(frozen=True)
class Progress:
    """Progress of a run as its folder tells it."""

    folder: Path
    steps: int  # run.steps
    step: int | None  # of the record; None: there is none that can be read

    @property
    def is_finished(self) -> bool:
        return self.step is not None and self.step >= self.steps

    def as_dict(self) -> dict[str, object]:
        """Return the values for --json."""
        return {
            "run_folder": str(self.folder),
            "finished": self.is_finished,
            "finished_step": self.step,
            "steps": self.steps,
        }

    def line(self) -> str:
        if self.is_finished:
            return f"{self.folder}: finished, {self.step} steps"
        if self.step is None:
            return f"{self.folder}: not finished, it has no record of a last step"
        return f"{self.folder}: not finished, its record is of step {self.step}, and run.steps is {self.steps}"


def read_progress(folder: Path, steps: int) -> Progress:
    """Read the record of a run folder. A record that cannot be read counts as none, for the run can then go on."""
    return Progress(folder, steps, _recorded_step(folder / NAME))


def write_finished(folder: Path, step: int, checkpoint: Path | None) -> None:
    """Write the record, whole or not at all. For rank 0, once the checkpoint is on disk. Raises HpcllmError."""
    record = {"step": step, "checkpoint": checkpoint.name if checkpoint else None}
    try:
        write_whole(folder / NAME, json.dumps(record) + "\n")
    except OSError as error:
        raise HpcllmError(f"cannot write {str(folder / NAME)!r}, the record of a finished run: {error}") from error


def remove_finished(folder: Path) -> None:
    """Remove the record: the run makes steps again. For rank 0. Raises HpcllmError."""
    try:
        (folder / NAME).unlink(missing_ok=True)
    except OSError as error:
        raise HpcllmError(f"cannot remove {str(folder / NAME)!r}, and the run is not finished: {error}") from error


def _recorded_step(path: Path) -> int | None:
    try:
        step = json.loads(read_bytes(path, MOST_BYTES))["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
