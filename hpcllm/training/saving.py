"""Saving a run: from the context of a rank to a checkpoint in its run folder.

loop   save(step) --> replicas equal? --> state, settled --> background.py --> checkpoints/step_00001000.h5 --> kept
         |                                                      |
         `--- is_done, after each step <------------------------`--> a record in log.jsonl: bytes, seconds, waited

Where every core computes, a thread that writes takes its time from the steps. So that is measured, and one write is
made in the loop to compare; the cheaper way is kept, and a line says so if that is the loop:

    writes    behind   behind   behind   loop    behind, or loop from here on
    counted   (first)  cost     cost     cost
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hpcllm.checkpoint.background import Background, Written
from hpcllm.checkpoint.folder import Retention, file_name
from hpcllm.checkpoint.layout import Attribute
from hpcllm.checkpoint.state import LocalSlabs, Residuals, RunState, local_slabs
from hpcllm.config.schema import to_tables
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.training.log import Log
from hpcllm.training.run_lock import RunLock
from hpcllm.training.step import compare_replicas

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext

LEAST_STEPS = 3  # without a write, before the steps beside one are compared to them
TRIED_BEHIND = 2  # writes whose cost is known before one is made in the loop
LONGEST_TRIAL_S = 60.0  # a write that takes longer behind the training is not tried in the loop
LEAST_GAIN = 0.9  # times what a write costs behind the training is what one in the loop may cost


@dataclass
class WriteCost:
    """Seconds of training that one write costs, behind it and in its loop. Of rank 0: steps end together.

        cost behind    waited + sum of (step - usual step) over the steps beside the write

    Pure: it is told of all times.
    """

    wants_loop: bool = False  # the next write is to be made in the loop
    behind_s: list[float] = field(default_factory=list)  # a write, the first two included
    loop_s: float | None = None  # None: not tried
    _usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=32))  # last steps without a write beside them
    _beside_s: list[float] = field(default_factory=list)  # steps beside the write under way

    def stepped(self, seconds: float, is_writing: bool) -> None:
        """Take note of a step. is_writing: beside a write."""
        (self._beside_s if is_writing else self._usual_s).append(seconds)

    def wrote(self, waited_s: float, took_s: float, in_loop: bool) -> None:
        """Take note of a write that is over; decide where the next one is made."""
        beside_s, self._beside_s = self._beside_s, []
        if in_loop:
            self.loop_s = took_s if self.loop_s is None else self.loop_s
            self.wants_loop = self.loop_s < LEAST_GAIN * median(self.behind_s[1:])
        elif self.loop_s is None and len(self._usual_s) >= LEAST_STEPS:
            usual_s = median(self._usual_s)
            self.behind_s.append(waited_s + sum(max(0.0, step_s - usual_s) for step_s in beside_s))
            # in the loop a write takes no more than behind the steps, but may take a few times less
            may_win = len(self.behind_s) > TRIED_BEHIND and median(self.behind_s[1:]) > took_s / 4
            self.wants_loop = may_win and took_s <= LONGEST_TRIAL_S


@dataclass
class Saving:
    """Writes the checkpoints of one start of a run. Called alike on all ranks."""

    run: RunContext
    residuals: Residuals | None
    background: Background
    log: Log | None  # rank 0's
    newest: Path | None  # newest checkpoint that is complete and has its name
    longest_s: float = 0.0  # longest time of a checkpoint, from its copy to its end
    _held: LocalSlabs | None = None
    _last_note: str = ""
    _cost: WriteCost = field(default_factory=WriteCost)

    @property
    def is_done(self) -> bool:
        """True if this rank's part of a write has ended: once it is true on all ranks, it is time to `finish`.

        Not collective. Raises errors that no other rank knows of, see background.py.
        """
        return self.background.is_done

    def save(self, step: int, position: int, validation_loss: float | None, goes_on: bool = True) -> None:
        """Begin to write a checkpoint, once the one before is written. Collective over the mesh.

        validation_loss: after this step, None if it was not measured. goes_on: training continues meanwhile. Raises
        ReplicaError; CheckpointError, of this write or of the one before; HpcllmError if another job has taken the
        folder.
        """
        compare_replicas(self.run, step)  # the file would mix them
        state = run_state(self.run, self.residuals, step, position, validation_loss)
        if self._held is None:
            self._held = local_slabs(state, self.run.mesh.world.rank)  # always the same memory
        path = self.run.run_folder / "checkpoints" / file_name(step)
        if self.background.asynchronous and on_root(self.run.mesh.world, lambda: self._cost.wants_loop):
            self._save_in_loop(step, path, self._held, state.attributes())
            return
        self._log(self.background.begin(step, path, self._held, state.attributes(), goes_on))
        if not self.background.asynchronous:
            self.finish()

    def before_update(self, is_written: bool) -> None:
        """End a write that all ranks are done with, and keep the update from what a device still copies.

        is_written: is_done on all ranks. Collective over the mesh if so.
        """
        if is_written:
            self.finish()
        self.background.before_update()

    def stepped(self, seconds: float) -> None:
        """Take note of the seconds of a step: of what a write beside it costs. Not collective."""
        self._cost.stepped(seconds, self.background.is_writing)

    def finish(self) -> None:
        """Wait for the write under way, if there is one. Collective over the mesh. Raises as `save`."""
        self._log(self._finished())

    def _finished(self) -> Written | None:
        return self.background.finish(self.log.print if self.log else lambda _: None)

    def _save_in_loop(self, step: int, path: Path, held: LocalSlabs, attributes: Mapping[str, Attribute]) -> None:
        """Write a checkpoint before the next step, where that is cheaper than beside it. Collective over the mesh."""
        self.finish()
        is_trial = self._cost.loop_s is None
        self.background.asynchronous = False
        try:
            self.background.begin(step, path, held, attributes, goes_on=False)
            self._log(self._finished(), in_loop=True)
        finally:
            self.background.asynchronous = True
        if is_trial and self._cost.wants_loop and self.log:
            self.log.print(
                f"checkpoints are written in the loop from here on: the last took {self._cost.loop_s:.2f} s, those "
                f"behind the training cost it {median(self._cost.behind_s[1:]):.2f} s each"
            )

    def _log(self, written: Written | None, in_loop: bool = False) -> None:
        if not written:
            return
        self._cost.wrote(written.waited_s, written.seconds, in_loop)
        report, self.newest = written.report, written.path
        self.longest_s = max(self.longest_s, written.seconds)
        if not self.log:
            return
        if report.note not in ("", self._last_note):
            self.log.print(report.note)
            self._last_note = report.note
        self.log.write(
            {
                "step": written.step,
                "checkpoint_s": written.seconds,
                "checkpoint_wait_s": written.waited_s,
                "checkpoint_bytes": report.bytes,
                "checkpoint_gb_s": report.gb_s,
            }
        )


@contextmanager
def open_saving(run: RunContext, lock: RunLock, log: Log | None, newest: Path | None) -> Iterator[Saving]:
    """Begin to save. newest: the checkpoint that the run goes on from. Collective over the mesh."""
    config = run.config.checkpoint
    comm = run.mesh.world.Dup()
    retention = Retention(run.run_folder / "checkpoints")
    background = Background(comm, config, lock.check, lambda: retention.tidy(config))
    saving = Saving(run, run.residuals() if config.feedback else None, background, log, newest)
    try:
        yield saving
    except HpcllmError as error:
        if error.everywhere:  # all ranks come here, and what they are writing is older than what went wrong
            with contextlib.suppress(HpcllmError):
                saving.finish()
        raise
    comm.Free()  # not in a `finally`: Free is collective


def run_state(
    run: RunContext, residuals: Residuals | None, step: int, position: int, validation_loss: float | None = None
) -> RunState:
    """Return the state of a run between two steps. Waits until the weights are settled, collective over dp."""
    return RunState(
        step=step,
        position=position,
        updates=run.optimizer.updates,
        loss_scale=run.loss_scale.value,
        good_steps=run.loss_scale.good_steps,
        validation_loss=validation_loss,
        config=to_tables(run.config),
        pieces=run.optimizer.pieces_to_write(),
        shards=run.shards,
        owned=run.owned,
        residuals=residuals,
        tokenizer_json=run.store.tokenizer_json,
        template=run.store.header.template,
        template_variables=run.store.header.template_variables,
        fingerprint=run.store.fingerprint,
        base=run.base,
        mesh=run.mesh.shape,
    )
