"""One job at a time in a run folder.

    job A   lock job.txt, write "A" -- train -- still "A"? save -- train -- still "A"? no: end, nothing written
    job B             lock denied: says so, ends | no locks here: write "B" and train

The operating system drops a lock with its process, so nothing stale keeps a requeued job out. Lustre mounted without
flock has no locks to give; there the later job wins, and the earlier one notices before it next writes a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpcllm.config.input_files import fault_of
from hpcllm.config.names import shown
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.training.finished import write_finished
from hpcllm.training.set_aside import JOB, set_aside_unusable

if TYPE_CHECKING:
    from mpi4py import MPI

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@dataclass
class RunLock:
    """Rank 0's lock of a run folder; on the other ranks nothing but its path."""

    folder: Path
    _owner: str = ""  # of this lock, as written to job.txt
    _file: IO[str] | None = None

    def take(self, restart: bool) -> None:
        """Make and lock the folder; a restart renames the old one, never deletes it. For rank 0. Raises ConfigError.

        Files in it that cannot be used are set aside, and said.
        """
        try:
            if restart and self.folder.exists():
                self._lock()
                self.folder.rename(self.folder.with_name(f"{self.folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"))
                self.release()
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lines = set_aside_unusable(self.folder, [JOB], [])
            self._sign(self._lock())
            lines += set_aside_unusable(self.folder)  # not before: another job may use them
        except BlockingIOError as error:
            self.release()
            raise ConfigError(_locked(self._path.read_text(encoding="utf-8", errors="replace"), self.folder)) from error
        except OSError as error:
            self.release()
            raise ConfigError(f"{_unusable(self.folder)}: {error}") from error
        if lines:
            print("\n".join(f"hpcllm: {line}" for line in lines), file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise HpcllmError if another job has taken the folder since. For rank 0, before it is written to."""
        try:
            holder = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise HpcllmError(f"the run folder is gone from under this job: {error}") from error
        if holder != self._owner:
            raise HpcllmError(
                f"another job ({holder}) has taken over {str(self.folder)!r}; this one ends and writes no checkpoint, "
                "so that the two do not mix"
            )

    def record(self, step: int, steps: int, checkpoint: Path | None) -> None:
        """Write the record `finished` if all steps are made and saved. For rank 0. Raises HpcllmError as check does."""
        self.check()
        if step >= steps:
            write_finished(self.folder, step, checkpoint)

    def release(self) -> None:
        """Let the next job in."""
        if self._file:
            self._file.close()
            self._file = None

    @property
    def _path(self) -> Path:
        return self.folder / JOB

    def _lock(self) -> IO[str]:
        """Open job.txt and lock it where the file system can. Raises BlockingIOError if another job has it."""
        self._file = file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return file

    def _sign(self, file: IO[str]) -> None:
        """Write the owner in place: a new file under the same name would not carry the lock."""
        from mpi4py import MPI  # check_lockable, which does not lock, must not start it

        host, since = MPI.Get_processor_name(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._owner = f"{secrets.token_hex(4)}: process {os.getpid()} on {host} since {since}"
        file.truncate(0)
        file.write(self._owner)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def lock_run(world: MPI.Intracomm, folder: Path, restart: bool) -> Iterator[RunLock]:
    """Hold the lock of a run folder, made if it is not there. Collective over world. Raises ConfigError."""
    lock = RunLock(folder)
    on_root(world, lambda: lock.take(restart))
    try:
        yield lock
    finally:
        lock.release()


def check_lockable(folder: Path) -> None:
    """Raise ConfigError if no job could lock the folder now. Writes nothing."""
    if fault := fault_of(folder):
        raise ConfigError(f"{_unusable(folder)}: {fault}")
    job = folder / JOB
    ground = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (ground.is_dir() and os.access(ground, os.W_OK | os.X_OK)):
        why = "there is no right to write in it" if ground.is_dir() else "it is no folder"
        raise ConfigError(f"{_unusable(folder)}: {str(ground)!r}: {why}")
    if os.path.isfile(job) and (holder := _holder(job)):
        raise ConfigError(_locked(holder, folder))


def _unusable(folder: Path) -> str:
    return f"the run folder {shown(str(folder))} (run.folder / run.name) cannot be made or written"


def _locked(holder: str, folder: Path) -> str:
    return f"another job ({holder}) is at work in {str(folder)!r}; let it end, or take another run.name"


def _holder(job: Path) -> str:
    """Return who has the lock; empty: nobody, or there are no locks here."""
    with job.open(encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
        except BlockingIOError:
            return file.read()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return ""
