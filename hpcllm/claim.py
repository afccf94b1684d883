"""One job at a time in a run folder.

    job A   lock job.txt, write "A" -- train -- still "A"? save -- train -- still "A"? no: end, nothing written
    job B             lock refused: says so, ends | no locks here: write "B" and train

The operating system drops a lock with its process, so nothing stale keeps a requeued job out. Lustre mounted without
flock has no locks to give; there the later job wins, and the earlier one notices before it next writes a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.together import on_root

if TYPE_CHECKING:
    from mpi4py import MPI

NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@dataclass
class Claim:
    """Rank 0's hold on a run folder; on the other ranks nothing but its path."""

    folder: Path
    _mine: str = ""
    _file: IO[str] | None = None

    def take(self, restart: bool) -> None:
        """Make the folder ready; on a restart the old one is renamed, never deleted. For rank 0. Raises ConfigError."""
        try:
            self._take(restart)
        except OSError as error:
            self.release()
            raise ConfigError(self._why(error)) from error

    def check(self) -> None:
        """Raise HpcllmError if another job has taken the folder since. For rank 0, before it is written to."""
        try:
            holder = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise HpcllmError(f"the run folder is gone from under this job: {error}") from error
        if holder != self._mine:
            raise HpcllmError(
                f"another job ({holder}) has taken over {str(self.folder)!r}; this one ends and writes no checkpoint, "
                "so that the two do not mix"
            )

    def release(self) -> None:
        """Let the next job in."""
        if self._file:
            self._file.close()
            self._file = None

    @property
    def _path(self) -> Path:
        return self.folder / "job.txt"

    def _take(self, restart: bool) -> None:
        if restart and self.folder.exists():
            self._lock()
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"))
            self.release()
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._sign(self._lock())

    def _lock(self) -> IO[str]:
        """The open file, locked where the file system can. Raises BlockingIOError if another job has it."""
        self._file = file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
        return file

    def _why(self, error: OSError) -> str:
        if isinstance(error, BlockingIOError):
            return _taken(self._path.read_text(encoding="utf-8"), self.folder)
        return f"the run folder {str(self.folder)!r} (run.folder / run.name) cannot be made or written: {error}"

    def _sign(self, file: IO[str]) -> None:
        """In place: a new file under the same name would not carry the lock."""
        from mpi4py import MPI  # a look at a folder, without a claim, does not start it

        host, since = MPI.Get_processor_name(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._mine = f"{secrets.token_hex(4)}: process {os.getpid()} on {host} since {since}"
        file.truncate(0)
        file.write(self._mine)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def claim_run(world: MPI.Intracomm, folder: Path, restart: bool) -> Iterator[Claim]:
    """Hold a run folder, made if it is not there, until the end. Collective over world. Raises ConfigError."""
    claim = Claim(folder)
    on_root(world, lambda: claim.take(restart))
    try:
        yield claim
    finally:
        claim.release()


def check_claim(folder: Path) -> None:
    """Whether a job could claim the folder now; nothing is written. Raises ConfigError."""
    ground = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (ground.is_dir() and os.access(ground, os.W_OK | os.X_OK)):
        why = "there is no right to write in it" if ground.is_dir() else "it is no folder"
        what = f"the run folder {str(folder)!r} (run.folder / run.name) cannot be made or written"
        raise ConfigError(f"{what}: {str(ground)!r}: {why}")
    job = folder / "job.txt"
    if job.exists() and (holder := _holder(job)):
        raise ConfigError(_taken(holder, folder))


def _taken(holder: str, folder: Path) -> str:
    return f"another job ({holder}) is at work in {str(folder)!r}; let it end, or take another run.name"


def _holder(job: Path) -> str:
    """Who has the lock; empty: nobody, or there are no locks here."""
    with job.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once
        except BlockingIOError:
            return file.read()
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
    return ""
