"""When a run saves, and what: from the parts of a rank to a checkpoint in its run folder.

loop    save(step) ---> state, settled ---> background.py ---> checkpoints/step_00001000.h5 ---> who may stay
          |                                    |
          `--- look, after each step <---------`---> a record in log.jsonl: bytes, seconds, seconds waited
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from hpcllm.assemble import Parts
from hpcllm.checkpoint.background import Background, Written
from hpcllm.checkpoint.folder import file_name
from hpcllm.checkpoint.pieces import Shards
from hpcllm.checkpoint.retention import Folder
from hpcllm.checkpoint.state import Holdings, RunState, attributes, holdings
from hpcllm.checkpoint.surplus import Surplus, find_surplus
from hpcllm.checkpoint.writer import Settings
from hpcllm.claim import Claim
from hpcllm.config import CheckpointConfig, to_tables
from hpcllm.errors import HpcllmError
from hpcllm.metrics import Log
from hpcllm.model.shapes import parameter_shapes


@dataclass
class Saving:
    """The checkpoints of one start of a run. The same calls on all ranks."""

    parts: Parts
    surplus: Surplus | None
    background: Background
    log: Log | None  # rank 0's
    newest: Path | None  # that is whole and has its name
    longest_s: float = 0.0  # that a checkpoint took, from its copy to its end
    _held: Holdings | None = None
    _noted: str = ""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part of a write has come to its end: once all ranks say so, it is time to `finish` it.

        Not collective. Raises what no other rank knows of, see background.py.
        """
        return self.background.is_done

    def look(self, written: bool) -> None:
        """written: whether all ranks are done with the write under way; then it is finished. Raises as `save`."""
        if written:
            self.finish()

    def save(self, step: int, position: int, validation_loss: float | None, goes_on: bool = True) -> None:
        """Begin to write a checkpoint, once the one before is written. Collective over the mesh.

        validation_loss: after this step, None if it was not measured. goes_on: whether training does meanwhile. Raises
        CheckpointError, of this write or of the one before; HpcllmError if the folder is another job's by now.
        """
        state = run_state(self.parts, self.surplus, step, position, validation_loss)
        if self._held is None:
            self._held = holdings(state, self.parts.mesh.world.rank)  # always the same memory
        path = self.parts.run_folder / "checkpoints" / file_name(step)
        self._note(self.background.begin(step, path, self._held, attributes(state), goes_on))
        if not self.background.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written. Collective over the mesh. Raises as `save`."""
        self._note(self.background.finish(self.log.say if self.log else lambda _: None))

    def _note(self, written: Written | None) -> None:
        if not written:
            return
        report, self.newest = written.report, written.path
        self.longest_s = max(self.longest_s, written.seconds)
        if not self.log:
            return
        if report.note not in ("", self._noted):
            self.log.say(report.note)
            self._noted = report.note
        self.log.note(
            {
                "step": written.step,
                "checkpoint_s": written.seconds,
                "checkpoint_wait_s": written.waited_s,
                "checkpoint_bytes": report.bytes,
                "checkpoint_gb_s": report.gb_s,
            }
        )


@contextmanager
def open_saving(parts: Parts, claim: Claim, log: Log | None, newest: Path | None) -> Iterator[Saving]:
    """newest: the checkpoint that the run goes on from. Collective over the mesh."""
    config = parts.config.checkpoint
    comm = MPI.Intracomm(parts.mesh.world.Dup())
    folder = Folder(parts.run_folder / "checkpoints")
    background = Background(comm, settings_of(config), config.asynchronous, claim.check, lambda: folder.tidy(config))
    saving = Saving(parts, surplus_of(parts) if config.feedback else None, background, log, newest)
    try:
        yield saving
    except HpcllmError as error:
        if error.everywhere:  # all ranks come here, and what they are writing is older than what went wrong
            with contextlib.suppress(HpcllmError):
                saving.finish()
        raise
    comm.Free()  # not in a `finally`: Free is collective


def settings_of(config: CheckpointConfig) -> Settings:
    return Settings(config.writer, config.stripe_count, config.stripe_mib)


def surplus_of(parts: Parts) -> Surplus | None:
    """What error feedback owes. Collective over the mesh."""
    return find_surplus(parts.optimizer.owed(), parts.mesh.world)


def shards_of(parts: Parts) -> Shards:
    return Shards(parameter_shapes(parts.config.model), parts.mesh.tp.rank, parts.mesh.tp.size)


def run_state(
    parts: Parts, surplus: Surplus | None, step: int, position: int, validation_loss: float | None = None
) -> RunState:
    """What is to be written of a run between two steps. Waits until the weights are settled, collective over dp."""
    return RunState(
        step=step,
        position=position,
        updates=parts.optimizer.updates,
        loss_scale=parts.loss_scale.value,
        good_steps=parts.loss_scale.good_steps,
        validation_loss=validation_loss,
        config=to_tables(parts.config),
        pieces=parts.optimizer.pieces_to_write(),
        shards=shards_of(parts),
        owned=parts.owned,
        surplus=surplus,
        tokenizer_json=parts.store.tokenizer_json,
        mesh=parts.mesh.shape,
    )
