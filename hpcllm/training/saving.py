"""Saving a run: from the context of a rank to a checkpoint in its run folder.

loop   save(step) --> replicas equal? --> state, settled --> background.py --> checkpoints/step_00001000.h5 --> kept
         |                                                      |
         `--- is_done, after each step <------------------------`--> a record in log.jsonl: bytes, seconds, waited
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.checkpoint.background import Background, Written
from hpcllm.checkpoint.folder import Retention, file_name
from hpcllm.checkpoint.state import LocalSlabs, Residuals, RunState, local_slabs
from hpcllm.config.schema import to_tables
from hpcllm.errors import HpcllmError
from hpcllm.training.log import Log
from hpcllm.training.run_lock import RunLock
from hpcllm.training.step import compare_replicas

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext


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
        self._log(self.background.begin(step, path, self._held, state.attributes(), goes_on))
        if not self.background.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for the write under way, if there is one. Collective over the mesh. Raises as `save`."""
        self._log(self.background.finish(self.log.print if self.log else lambda _: None))

    def _log(self, written: Written | None) -> None:
        if not written:
            return
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
        fingerprint=run.store.fingerprint,
        mesh=run.mesh.shape,
    )
