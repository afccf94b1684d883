"""File in a run folder by which a start learns that the one before died of sending device memory.

    start 1    write gpu_aware.txt | ranks send device memory | remove it            MPI reads device memory
    start 1    write gpu_aware.txt | ranks send ... SIGSEGV
    start 2    gpu_aware.txt is there                          -> through the host, with a line that says why
    start 3    another MPI library, so it is of no account     -> tried again

Only rank 0 touches it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from mpi4py import MPI

MARKER = "gpu_aware.txt"
GPU_AWARE_MPI = (
    "take an MPI built for the GPUs: Cray MPICH with MPICH_GPU_SUPPORT_ENABLED=1 and mpi4py linked to libmpi_gtl_*, "
    "Open MPI or MPICH built with CUDA or ROCm"
)
ADVICE = (
    "ranks of a node need one control group to open one another's devices (srun --gpu-bind=none in place of "
    "--gpus-per-task), or MPICH_GPU_IPC_ENABLED=0; communication.gpu_aware = 'no' skips the trial"
)


@dataclass
class Marker:
    """The file of one run folder. A folder that cannot be written has none; the run's own files say why."""

    folder: Path
    _is_new: bool = False  # the folder, made for this file alone

    @property
    def path(self) -> Path:
        return self.folder / MARKER

    def left_behind(self) -> str:
        """Return why this start is not to try; "" if it may, as none before it has died with this library."""
        try:
            library, _, rest = self.path.read_text(encoding="utf-8", errors="replace").partition("\n")
        except OSError:
            return ""
        if library != _library():
            return ""
        when = rest.partition("\n")[0]
        return f"the start of {when} did not live through sending it; delete {self.path} to try again; {ADVICE}"

    def begin(self) -> None:
        """Write the file, and say to people what it is for."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = f"{_library()}\n{now}\nranks send device memory; if the job is over, it died of that; {ADVICE}\n"
        with contextlib.suppress(OSError):
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            hint = f"if the job ends here, start it again: by {self.path} it will know, and send through the host"
            print(f"hpcllm: ranks try to send device memory; {hint}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the file; and the folder where it was made for it, as a run asks whether its own is there."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            if self._is_new:
                self.folder.rmdir()


def _library() -> str:
    """Return one line that changes with what could make a trial end otherwise."""
    return f"{' '.join(MPI.Get_library_version().split())[:200]}; PyTorch {torch.__version__}"
