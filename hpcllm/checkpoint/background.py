"""Write checkpoints behind the training: a step pays for a copy in memory, a thread for the file.

    main thread   step | wait for the last write | copy | step | step | step: are all ranks done? | step ...
                                                     |                        ^
    host memory                       [ model | moments | residuals ]         |       used again; pinned for a device
                                                     |                        |
    thread                                           plan (once), write, tidy-'       on a communicator of its own

From a device the copy is handed to a stream of its own, which carries it while the next step computes. That step's
update waits for it on the device (`before_update`), and the thread on the host: the loop waits for nothing.

    compute   step | residuals | next step: forward, backward       | its update
                               `- event -.                          `- waits for the event
    copy                                 | model, moments | event --'

Residuals of error feedback, which the backward pass changes, are copied before it.

Every rank begins a write after the same step, and looks at its end after the same step too: whether a rank is done goes
through the sum that ends each step anyway. A write that failed raises the same error on all ranks; a rank that failed
alone raises at once, and the job ends there. Needs MPI_THREAD_MULTIPLE: where the library gives less, and with
`asynchronous` off, the same write is made in the loop, from the memory itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mpi4py import MPI

from hpcllm.checkpoint.layout import Attribute
from hpcllm.checkpoint.plan import Plan
from hpcllm.checkpoint.slabs import Slab
from hpcllm.checkpoint.state import FEEDBACK, LocalSlabs, arrays_of
from hpcllm.checkpoint.writer import WriteReport, prepare, write
from hpcllm.collectives.worker import can_thread, run_in_order
from hpcllm.config.schema import CheckpointConfig
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.system.device import recorded
from hpcllm.system.host_memory import host_memory

log = logging.getLogger(__name__)
LANE = "checkpoint"
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
    _stream: torch.Stream | None = None  # carries copies of a device
    _is_reading: bool = False  # the copy stream may still read the memory itself
    _underway: _Underway | None = None

    def __post_init__(self) -> None:
        self.asynchronous = self.settings.asynchronous and can_thread()

    @property
    def copy_bytes(self) -> int:
        """Host memory that the copy takes; 0 before there is one."""
        pieces = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in self._copies.values()}
        return sum(pieces.values())

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
        copies = self.asynchronous and (goes_on or self._stream is not None)
        tensors, done = self._copy(held.tensors) if copies else (held.tensors, _recorded(held.tensors))

        def job() -> tuple[WriteReport, float]:
            if done:
                torch.accelerator.set_device_index(done.device)  # a new thread starts with device 0
                done.synchronize()
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

    def before_update(self) -> None:
        """Let what the device is told after this wait until the last copy has read the memory. Not collective."""
        if self._stream and self._is_reading:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
            self._is_reading = False

    def _copy(self, tensors: Mapping[Slab, torch.Tensor]) -> tuple[dict[Slab, torch.Tensor], torch.Event | None]:
        """Copy to host memory; returns the copies, and the event by which they are complete, None: they are now."""
        device = _device_of(tensors)
        if not self._copies:
            memory = host_memory({slab: tensor.nbytes for slab, tensor in tensors.items()}, pinned=device is not None)
            self._copies = {slab: memory[slab].view(x.dtype).view(x.shape) for slab, x in tensors.items()}
            self._stream = torch.Stream(device) if device else None
        changed_soon = [slab for slab in tensors if slab.dataset == FEEDBACK]
        _fill(self._copies, tensors, changed_soon if self._stream else tensors)
        if not self._stream:
            return self._copies, None
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            _fill(self._copies, tensors, [slab for slab in tensors if slab.dataset != FEEDBACK])
            self._is_reading = True
            return self._copies, _recorded(tensors)


def _fill(copies: Mapping[Slab, torch.Tensor], tensors: Mapping[Slab, torch.Tensor], slabs: Iterable[Slab]) -> None:
    for slab in slabs:
        copies[slab].copy_(tensors[slab], non_blocking=True)


def _device_of(tensors: Mapping[Slab, torch.Tensor]) -> torch.device | None:
    """Return the device that some of the tensors are on, None if all are on the CPU."""
    return next((tensor.device for tensor in tensors.values() if not tensor.is_cpu), None)


def _recorded(tensors: Mapping[Slab, torch.Tensor]) -> torch.Event | None:
    """Return an event at the end of the current stream of the tensors' device; None if they are on the CPU."""
    device = _device_of(tensors)
    return recorded(device) if device else None
