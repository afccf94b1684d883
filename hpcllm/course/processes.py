"""The processes of a check: started with a bound on what they print, and ended whatever they do.

    job(words) --> mpirun --> ranks --> what a student's file starts, also in sessions of its own
      |  this process adopts those whose parents have ended, so all of them descend from it
      `- at the end, by an error, Ctrl-C, SIGTERM or SIGHUP:  SIGTERM to mpirun or srun, a second for it to pass that on
                                                              SIGSTOP to all, again until there is none that runs
                                                              SIGKILL to all

Stopped first, a process that starts others as fast as they are ended has no turn in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 4.0  # for mpirun or srun to end its ranks and to remove its files: Open MPI's needs more than a second
END_S = 10.0  # until all is ended, else it is left
LOOK_S = 0.01
MOST_OUTPUT_BYTES = 1 << 16
SHARED_MEMORY = "/dev/shm/"
PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 1
LIBC = ctypes.CDLL(None)  # loaded before any fork


class Job:
    """A job that was started. output: the end of what its processes printed."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.before = frozenset(descendants(os.getpid()))
        self.output = bytearray()
        self.steps: set[str] = set()  # of Slurm, JOB.STEP, as the ranks say them
        self.shared: set[str] = set()  # files in memory, as the ranks on this machine say them
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours; they are ended below
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # mpirun and srun then end the ranks
        )
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        assert self.process.stdout
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            self.output += data
            del self.output[:-MOST_OUTPUT_BYTES]

    def note(self, ready: Mapping[str, Any]) -> None:
        """Take from a rank's first record what else has to be ended or removed with it."""
        if ready["step"]:
            self.steps.add(ready["step"])
        if ready["host"] == where_pids_count():
            self.shared |= set(ready["shared"])

    def end(self) -> None:
        """End the job and everything that it has started, in whatever session."""
        if self.process.poll() is None:
            self.process.terminate()  # srun and mpirun hand it on to other nodes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            self._cancel_steps()
        deadline_s = time.monotonic() + END_S
        while (left := self._left()) and time.monotonic() < deadline_s:
            self._stop_all(deadline_s)
            for pid in self._left() or left:
                _send(pid, signal.SIGKILL)
            time.sleep(LOOK_S)
            self._reap(left)
        self.process.wait()
        remove_shared(self.shared)
        self._reader.join(END_S)
        if not self._reader.is_alive() and self.process.stdout:
            self.process.stdout.close()

    def _left(self) -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in self.before]

    def _stop_all(self, deadline_s: float) -> None:
        """Stop processes until none is left that runs."""
        while time.monotonic() < deadline_s:
            running = [pid for pid in self._left() if state_of(pid) not in ("T", "t", "Z", "X", "")]
            if not running:
                return
            for pid in running:
                _send(pid, signal.SIGSTOP)

    def _reap(self, pids: Sequence[int]) -> None:
        self.process.poll()
        for pid in pids:
            if pid != self.process.pid:  # an orphan that this process has adopted
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _cancel_steps(self) -> None:
        """End steps of Slurm, whatever srun has done: their ranks are no descendants of ours."""
        if self.steps and (scancel := shutil.which("scancel")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                words = [scancel, "--signal=KILL", *sorted(self.steps)]
                subprocess.run(words, timeout=END_S, capture_output=True, check=False)


@contextlib.contextmanager
def job(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Job]:
    """Start a job; all of its processes end with this."""
    with leaving_at_signals():
        started = Job(words, folder, environment)
        try:
            yield started
        finally:
            with undisturbed():
                started.end()


@contextlib.contextmanager
def leaving_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as an exit does, so that nothing is left running or lying about."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put signals off that would leave the work within half done."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(number: signal.Signals) -> None:
    """Let this process get a signal when the one that started it ends, killed or not."""
    LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as ps shows it; '' if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def shared_memory() -> list[str]:
    """List the files in memory that this process has mapped: MPI's, which lie there for ever if it is killed."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return sorted({line[line.index(SHARED_MEMORY) :] for line in text.splitlines() if SHARED_MEMORY in line})


def remove_shared(paths: Iterable[str]) -> None:
    """Remove such files of a job that has ended."""
    for path in paths:
        if path.startswith(SHARED_MEMORY) and ".." not in path:
            with contextlib.suppress(OSError):
                os.unlink(path)


def where_pids_count() -> str:
    """Name this machine, or this container, as far as numbers of processes mean the same in it."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def descendants(pid: int) -> list[int]:
    """List the processes that descend from one."""
    found: list[int] = []
    left = _children(pid)
    while left:
        found += left
        left = [child for each in left for child in _children(each)]
    return found


def _children(pid: int) -> list[int]:
    text = ""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            text += path.read_text(encoding="ascii")
    return [int(word) for word in text.split()]
