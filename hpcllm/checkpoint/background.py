"""Write checkpoints behind the training: a step pays for a copy in memory, a thread for the file.

    main thread   step | wait for the last write | copy | step | step | step: are all ranks done? | step ...
                                                     |                        ^
    host memory                       [ model | moments | residuals ]         |       used again; pinned for a device
                                                     |                        |
    thread                                           plan (once), write, tidy-'       on a communicator of its own

From a device the copy is handed to its stream, before the next step's work, and the thread waits for it: the loop does
not. Every rank begins a write after the same step, and looks at its end after the same step too: whether a rank is done
goes through the sum that ends each step anyway. A write that failed raises the same error on all ranks; a rank that
failed alone raises at once, and the job ends there. Needs MPI_THREAD_MULTIPLE: where the library gives less,
and with `asynchronous` off, the same write is made in the loop, from the memory itself.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mpi4py import MPI

from hpcllm.checkpoint.layout import Attribute
from hpcllm.checkpoint.plan import Plan
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import LocalSlabs, arrays_of
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.collectives.worker import can_thread, run_in_order
from hpcllm.config.schema import CheckpointConfig
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_root

log = logging.getLogger(__name__)
LANE = "checkpoint"
ALIGN_BYTES = 64
PIECE_BYTES = 64 << 20
TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class Written:
    """A checkpoint that is whole and has its name."""

    step: int
    report: WriteReport
    seconds: float  # from the copy to the end, with the deletion of old files after the rename
    waited_s: float  # seconds in which this rank did not train: for the write before, and for the copy

    @property
    def path(self) -> Path:
        return self.report.path


@dataclass
class _Underway:
    step: int
    path: Path
    began_s: float
    waited_s: float
    result: Future[tuple[WriteReport, float]]  # the report, and the clock when it was over


@dataclass
class Background:
    """Writes one checkpoint at a time. comm: nobody else's, for the thread.

    check: called on rank 0 before a write and before the file gets its name; tidy: after it, and returns a note for
    people. Both in the thread.
    """

    comm: MPI.Intracomm
    settings: CheckpointConfig
    check: Callable[[], None]
    tidy: Callable[[], str]
    _plan: Plan | None = None
    _copies: dict[Slab, torch.Tensor] = field(default_factory=dict)
    _copied: torch.Event | None = None  # None: the CPU copied, and is done when it goes on
    _underway: _Underway | None = None

    def __post_init__(self) -> None:
        self.asynchronous = self.settings.asynchronous and can_thread()

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copy takes; 0 before there is one."""
        return sum(_room(copy) for copy in self._copies.values())

    @property
    def is_writing(self) -> bool:
        """True if a write has begun and `finish` has not been called since."""
        return self._underway is not None

    @property
    def is_done(self) -> bool:
        """True if this rank has nothing left to do for the write under way. Raises an error of this rank alone."""
        if not self._underway or not self._underway.result.done():
            return False
        error = self._underway.result.exception()
        if error and not (isinstance(error, HpcllmError) and error.everywhere):
            raise error  # nobody else knows: a lone failure, which ends the job
        return True

    def begin(
        self, step: int, path: Path, held: LocalSlabs, attributes: Mapping[str, Attribute], goes_on: bool = True
    ) -> Written | None:
        """Begin to write `path` from the slabs of all ranks, the same each time. Collective over comm.

        goes_on: True if training does, so that a copy must be made. Waits for the write before and returns its result,
        or raises its error; None if there was none. `finish` returns the result of this one.
        """
        start_s = time.perf_counter()
        before = self.finish()
        began_s = time.perf_counter()
        log.debug("begins to write %s", path)
        tensors = self._copy(held.tensors) if self.asynchronous and (goes_on or self._copied) else held.tensors

        def job() -> tuple[WriteReport, float]:
            if self._copied:
                torch.accelerator.set_device_index(self._copied.device)  # a new thread starts with device 0
                self._copied.synchronize()
            on_root(self.comm, self.check)  # before gigabytes are written in vain
            if self._plan is None:
                self._plan = prepare(self.comm, held.specs, held.tensors.keys())
            report = write(path, self.comm, self._plan, arrays_of(tensors), attributes, self.settings, self.check)
            notes = [report.note, on_root(self.comm, self.tidy)]
            return dataclasses.replace(report, note="; ".join(filter(None, notes))), time.perf_counter()

        result = run_in_order(job, self.asynchronous, LANE)
        self._underway = _Underway(step, path, began_s, time.perf_counter() - start_s, result)
        return before

    def finish(self, tell: Callable[[str], None] = lambda _: None) -> Written | None:
        """Wait for the write under way, if there is one. Collective over comm. Raises CheckpointError on all ranks.

        tell: is given a line now and then: a large file may take minutes, and there is no time limit here.
        """
        if (now := self._underway) is None:
            return None
        while wait([now.result], TELL_EVERY_S).not_done:
            tell(f"writing {now.path.name}, for {time.perf_counter() - now.began_s:.0f} s so far")
        self._underway = None
        report, ended_s = now.result.result()
        log.debug("wrote %s: %d bytes", now.path, report.bytes)
        return Written(now.step, report, ended_s - now.began_s, now.waited_s)

    def _copy(self, tensors: Mapping[Slab, torch.Tensor]) -> dict[Slab, torch.Tensor]:
        """Copies in host memory, which are complete once `_copied` has come."""
        device = next((tensor.device for tensor in tensors.values() if not tensor.is_cpu), None)
        if not self._copies:
            self._copies = _buffers(tensors, pinned=device is not None)
            self._copied = torch.Event(device) if device else None
        for slab, tensor in tensors.items():
            self._copies[slab].copy_(tensor, non_blocking=True)
        if self._copied:
            self._copied.record()
        return self._copies


def _buffers(tensors: Mapping[Slab, torch.Tensor], pinned: bool) -> dict[Slab, torch.Tensor]:
    """Make a tensor in host memory for each. Pinned memory comes in powers of two anyway, so all pieces are such."""
    left = sum(_room(tensor) for tensor in tensors.values())
    found, piece, place = {}, torch.empty(0, dtype=torch.uint8), 0
    for slab, tensor in tensors.items():
        if piece.numel() - place < tensor.nbytes:
            size = 1 << (max(tensor.nbytes, min(left, PIECE_BYTES)) - 1).bit_length()
            piece, place = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), 0
        found[slab] = piece[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place, left = place + _room(tensor), left - _room(tensor)
    return found


def _room(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGN_BYTES) * ALIGN_BYTES
