"""A job that stands still says why, once: long waits are told to rank 0, which asks everybody, waits, and ends the job.

    rank 3   waits ........... past the limit: "I wait for rank 2" --+
    rank 1   waits ................... asked: "I wait for rank 2" ---+--> rank 0: heard one? ask all, collect for
    rank 2   (stopped)                                               |    GRACE_S, then raise: who waits for whom
    rank 0   waits, and looks now and then for such words  <---------+

Waits look here about ten times a second, from whichever thread they are in; waits shorter than that never do. Rank 1
hears the same and speaks DEPUTY_S later, for when rank 0 is the one that is stopped; if both are, each other rank ends
the job in its own words. The messages have a communicator of their own, are a line of text each, and block nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm.errors import StallError
from hpcllm.stall import Waiting, report

REPORTERS = 2  # ranks 0 and 1
GRACE_S = 2.0  # for the ranks to answer
DEPUTY_S = 1.5  # from one reporter to the next, then to everybody else
TELL, ASK = 0, 1
NAME_BYTES = 80


@dataclass
class Watch:
    """One rank's ear and mouth. comm: a communicator of its own."""

    comm: MPI.Intracomm
    describe: Callable[[int], str]  # rank -> where it stands
    heard: list[Waiting] = field(default_factory=list)  # on the reporters
    _asked: bool = False
    _stalled: bool = False  # some wait that this rank knows of has passed its limit
    _told: set[int] = field(default_factory=set)  # threads that have said what they wait for
    _leaving: list[MPI.Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, what: Callable[[], str], waited_s: float, is_over: bool) -> None:
        """See waiting.Watch: tell what is awaited where it has been too long, or somebody asks."""
        with self._lock:
            self._listen()
            self._stalled |= is_over
            if (self._stalled or self._asked) and threading.get_ident() not in self._told:
                self._told.add(threading.get_ident())
                self._tell(Waiting(self.comm.rank, waited_s, what()))
        if self._stalled and not is_over:
            raise StallError(f"rank {self.comm.rank} waited for {what()} when a wait passed its limit")

    def lines(self) -> Iterator[str]:
        """On a reporter: 'rank 0: dp 0, stage 0, process 4711 on node7', rank after rank."""
        return (f"rank {rank}: {self.describe(rank)}" for rank in range(self.comm.size))

    def verdict(self) -> str:
        """On a reporter: what the answers say, after GRACE_S for them to come. On other ranks it is empty.

        They return late, rank after rank: whoever does finds that those before it did not end the job.
        """
        turn = min(self.comm.rank, REPORTERS)
        if turn < REPORTERS:
            self._ask()
        end_s = time.monotonic() + GRACE_S + turn * DEPUTY_S
        while time.monotonic() < end_s:
            with self._lock:
                self._listen()
            time.sleep(0.01)
        return report(self.heard, self.comm.size, self.describe) if self.heard else ""

    def _listen(self) -> None:
        """Take in what has come; also lets what is leaving leave."""
        self._leaving = [request for request in self._leaving if not request.Test()]
        status = MPI.Status()
        while message := self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            text = bytearray(status.Get_count(MPI.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            message.Recv([text, MPI.BYTE])
            if tag == ASK:
                self._asked = True
            else:
                self._stalled = True
                self.heard.append(_waiting(source, text))

    def _tell(self, waiting: Waiting) -> None:
        text = f"{waiting.waited_s:.3f} {waiting.what}".encode()
        for reporter in range(min(REPORTERS, self.comm.size)):
            if reporter == self.comm.rank:
                self.heard.append(waiting)
            else:
                self._leaving.append(self.comm.Isend([text, MPI.BYTE], reporter, TELL))

    def _ask(self) -> None:
        nothing = bytearray()
        others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
        with self._lock:
            self._leaving += [self.comm.Isend([nothing, MPI.BYTE], rank, ASK) for rank in others]


@contextmanager
def watching(world: MPI.Intracomm, describe: Callable[[int], str]) -> Iterator[Watch]:
    """While open: a wait with this Watch that passes its limit ends the job with a report. Collective over world.

    describe: rank -> its place in the mesh. Raises StallError with the report on rank 0; on others later, if at all.
    """
    processes = _processes(world)
    watch = Watch(
        MPI.Intracomm(world.Dup()), lambda rank: f"{describe(rank)}, {processes[rank].decode(errors='replace')}"
    )
    try:
        yield watch
    except StallError as error:
        if verdict := watch.verdict():
            raise StallError(verdict) from error
        raise
    watch.comm.Free()  # not in a `finally`: Free is collective


def _processes(world: MPI.Intracomm) -> NDArray[np.bytes_]:
    """(ranks,) 'process 4711 on node7', on the reporters; nobody else keeps a table of all ranks. Collective."""
    name = f"process {os.getpid()} on {MPI.Get_processor_name()}".encode()
    mine = np.array(name[:NAME_BYTES], dtype=f"S{NAME_BYTES}")
    table = np.empty(world.size if world.rank < REPORTERS else 0, dtype=mine.dtype)
    for reporter in range(min(REPORTERS, world.size)):
        landing = [table, MPI.BYTE] if world.rank == reporter else None
        world.Gather([mine, MPI.BYTE], landing, reporter)
    return table


def _waiting(rank: int, text: bytearray) -> Waiting:
    waited_s, _, what = text.decode().partition(" ")
    return Waiting(rank, float(waited_s), what)
