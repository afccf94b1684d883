"""A rank as a forked process that asks before each call to the disk and each meeting with the others.

    student's save --> os.pwrite --------> Call    --> scheduler --> leave: the call is made, in part, or fails
                   --> comm.gather ------> Meeting --> scheduler --> what the others brought

MPI ends a whole job, the check included, with the first rank that is killed; these ranks may be killed by the hundred.
The files and the signal are real; a sync is noted and takes no time, as no power is lost. Forked by a process that has
never started MPI.
"""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import stat
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hpcllm.course.lab import LawError

CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC  # flags of an open that is asked about
MEETINGS = ("barrier", "bcast", "gather", "allgather", "reduce", "allreduce", "scan", "exscan")


class Call(NamedTuple):
    """A call to the disk."""

    name: str  # open, write, sync, rename, remove, truncate
    path: str = ""
    target: str = ""  # of rename
    inode: int = 0  # of the open file
    is_folder: bool = False
    offset: int = 0
    data: bytes = b""


class Meeting(NamedTuple):
    """A collective operation: its name, the root if it has one, what this rank brings."""

    name: str
    root: int
    value: Any


class End(NamedTuple):
    """The end of a rank: returned, raised, or wrong (a LawError; value: hint and what was shown)."""

    how: str
    value: Any = None


class Leave(NamedTuple):
    """An answer to a Call. error: of the system, raised in its place; is_short: half of the bytes are written."""

    error: int = 0
    is_short: bool = False


class Gate:
    """This rank's end of the line to the scheduler."""

    def __init__(self, line: Connection) -> None:
        self.line = line

    def ask(self, request: Any) -> Any:
        """Send a request, and wait for the answer."""
        self.line.send(request)
        return self.line.recv()

    def make(self, call: Call, work: Callable[[bool], Any]) -> Any:
        """Make a call once there is leave; says afterwards if it was made. work: is given True to do half of it."""
        leave: Leave = self.ask(call)
        if leave.error:
            self.line.send(False)
            raise OSError(leave.error, os.strerror(leave.error), call.path or None)
        try:
            result = work(leave.is_short)
        except BaseException:
            self.line.send(False)
            raise
        self.line.send(True)
        return result


_gates: list[Gate] = []  # one in a rank that asks, none elsewhere


class GroupComm:
    """The communicator of such ranks: collectives on objects, as mpi4py has them in lower case.

    A rank goes on as soon as it has what it needs, as with MPI: the root of a bcast waits for nobody.
    """

    def __init__(self, gate: Gate, rank: int, size: int) -> None:
        self.gate, self.rank, self.size = gate, rank, size

    def Get_rank(self) -> int:  # noqa: N802 -- mpi4py's name
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 -- mpi4py's name
        return self.size

    def __getattr__(self, name: str) -> NoReturn:
        raise LawError("forbidden", f"the function calls comm.{name}")

    def _meet(self, name: str, value: Any, root: int = 0) -> list[Any]:
        values: list[Any] = self.gate.ask(Meeting(name, root, value))
        return values

    def barrier(self) -> None:
        self._meet("barrier", None)

    Barrier = barrier

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self._meet("bcast", obj, root)[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        values = self._meet("gather", sendobj, root)
        return values if self.rank == root else None

    def allgather(self, sendobj: Any) -> list[Any]:
        return self._meet("allgather", sendobj)

    def reduce(self, sendobj: Any, op: Any = operator.add, root: int = 0) -> Any:
        values = self._meet("reduce", sendobj, root)
        return functools.reduce(op, values) if self.rank == root else None

    def allreduce(self, sendobj: Any, op: Any = operator.add) -> Any:
        return functools.reduce(op, self._meet("allreduce", sendobj))

    def scan(self, sendobj: Any, op: Any = operator.add) -> Any:
        return functools.reduce(op, self._meet("scan", sendobj)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Any = operator.add) -> Any:
        values = self._meet("exscan", sendobj)[: self.rank]
        return functools.reduce(op, values) if values else None


def needed(meeting: Meeting, rank: int, size: int) -> range:
    """Return the ranks that have to have come before this one goes on."""
    match meeting.name:
        case "bcast":
            return range(meeting.root, meeting.root + 1)
        case "gather" | "reduce":
            return range(size) if rank == meeting.root else range(0)
        case "scan" | "exscan":
            return range(rank)
        case _:
            return range(size)


def act(line: Connection, rank: int, size: int, asks: bool, work: Callable[[GroupComm], Any]) -> NoReturn:
    """Be a rank: do the work, say how it ended, and end. asks: before each call to the disk."""
    gate = Gate(line)
    _gates[:] = [gate] if asks else []
    try:
        end = End("returned", work(GroupComm(gate, rank, size)))
    except LawError as wrong:
        end = End("wrong", (wrong.hint, wrong.shown))
    except BaseException as error:
        end = End("raised", f"{type(error).__name__}: {error}"[:300])
    _gates[:] = []
    line.send(end)
    os._exit(0)


def _describe(name: str, given: Sequence[Any]) -> Call | None:
    """Describe a call of os; None: one that changes no file."""
    if name == "open":
        return Call("open", os.fspath(given[0])) if given[1] & CHANGES else None
    if name in ("rename", "replace", "link"):
        return Call("rename" if name != "link" else "link", os.fspath(given[0]), os.fspath(given[1]))
    if name in ("unlink", "remove"):
        return Call("remove", os.fspath(given[0]))
    if isinstance(given[0], str | Path):
        return Call("truncate", str(given[0]))
    kind = os.fstat(given[0])
    if not stat.S_ISREG(kind.st_mode) and not stat.S_ISDIR(kind.st_mode):
        return None
    call = Call("sync", inode=kind.st_ino, is_folder=stat.S_ISDIR(kind.st_mode))
    if name in ("fsync", "fdatasync"):
        return call
    if name in ("ftruncate", "truncate", "posix_fallocate"):
        return call._replace(name="truncate")
    offset = given[2] if name == "pwrite" else os.lseek(given[0], 0, os.SEEK_CUR)
    return call._replace(name="write", offset=offset, data=bytes(memoryview(given[1]).cast("B")))


def _asking(name: str) -> Callable[..., Any]:
    real = (lambda _: None) if name in ("fsync", "fdatasync") else getattr(os, name)

    def function(*given: Any, **named: Any) -> Any:
        call = _describe(name, given) if _gates else None
        if call is None:
            return real(*given, **named)

        def work(is_short: bool) -> Any:
            half = (given[0], call.data[: len(call.data) // 2], *given[2:])
            return real(*(half if is_short and call.data else given), **named)

        return _gates[0].make(call, work)

    return function


def _forbidding(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def function(*given: Any, **named: Any) -> Any:
        mode = str(named.get("mode", given[1] if len(given) > 1 else "r"))
        if _gates and (name != "open" or set(mode) & set("wax+")):
            raise LawError("forbidden", f"the function calls {name}{f' with mode {mode!r}' if name == 'open' else ''}")
        return real(*given, **named)

    return function


def install() -> None:
    """Make the calls of os ask, in ranks that ask; others that write are rejected there."""
    for name in ("open", "write", "pwrite", "fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove"):
        setattr(os, name, _asking(name))
    for name in ("truncate", "ftruncate", "posix_fallocate"):
        setattr(os, name, _asking(name))
    for name in ("writev", "pwritev", "sendfile", "copy_file_range"):
        if hasattr(os, name):
            setattr(os, name, _forbidding(f"os.{name}", getattr(os, name)))
    builtins.open = io.open = _forbidding("open", io.open)
