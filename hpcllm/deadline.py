"""When a run has to stop by itself, so that its last checkpoint is on disk before the time is over.

    now          stop after this step: left < margin                    limit
     |--- step ---|- - - - - - - - - - - - - - - margin - - - - - - - - -|
                     one more step, a validation, a write that is under way, the last write, the end of the job

The limit is the batch job's, or limits.wall_s from the start of the process, whichever comes first. The margin is
limits.margin_s, or made of the longest that each of these has taken in this start. Rank 0 decides for all.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from hpcllm import STARTED_S
from hpcllm.config import Config
from hpcllm.model.shapes import parameter_count
from hpcllm.slurm import BatchJob, batch_job

BYTES_A_PARAMETER = 16  # in a checkpoint: fp32 master and moments, and weights; error feedback is not counted
GUESSED_BYTES_S = 0.5e9  # of the first write: what one slow disk does
WRITES, STEPS = 2, 2  # one write under way as the last begins; the step that is cut off by the limit, and doubt
LEAVING_S = 10.0  # from the last write to the end of the job: MPI, the launcher, the batch script
FAR_S, NEAR_S = 300.0, 15.0  # between questions to the batch system, and near the end
NEAR_MARGINS = 2.0


@dataclass
class Margin:
    """Seconds before the limit at which a run stops."""

    fixed_s: float  # 0: by what is measured
    state_bytes: float  # of a checkpoint, about; until a write is measured
    validation_batches: float = 0.0  # as many samples as a validation in mid-run has, in steps; until one is measured
    write_s: float = 0.0
    validation_s: float = 0.0
    _steps: list[float] = field(default_factory=list)  # the first, and the longest of the others

    @property
    def seconds(self) -> float:
        if self.fixed_s:
            return self.fixed_s
        write_s = self.write_s or self.state_bytes / GUESSED_BYTES_S
        validation_s = self.validation_s or self.validation_batches * self.step_s
        return WRITES * write_s + STEPS * self.step_s + validation_s + LEAVING_S

    @property
    def step_s(self) -> float:
        """The first step also compiles and allocates, and counts only while there is no other."""
        return self._steps[-1] if self._steps else 0.0

    def step(self, seconds: float) -> None:
        self._steps = [*self._steps[:1], max(seconds, *self._steps[1:], 0.0)]

    def write(self, seconds: float) -> None:
        self.write_s = max(self.write_s, seconds)

    def validation(self, seconds: float) -> None:
        self.validation_s = max(self.validation_s, seconds)


@dataclass
class Deadline:
    """For rank 0. wall_s: from the start of the process, 0: no limit of ours."""

    wall_s: float
    margin: Margin
    job: BatchJob | None

    @property
    def left_s(self) -> float:
        """Until the limit; inf if there is none."""
        ends_s = [STARTED_S + self.wall_s] if self.wall_s else []
        return min([*ends_s, self.job.end_s if self.job else math.inf]) - time.monotonic()

    def is_near(self) -> bool:
        """Whether it is time to stop. Asks the batch system now and then whether it has changed the limit."""
        if self.job:
            is_soon = self.left_s < NEAR_MARGINS * self.margin.seconds + FAR_S
            self.job.refresh(NEAR_S if is_soon else FAR_S)
        return self.left_s < self.margin.seconds

    def open(self) -> None:
        """Ask the batch system for the first time; waits for its answer a moment."""
        if self.job:
            self.job.ask_first()

    def lines(self) -> list[str]:
        """What a run says of its time as it starts."""
        name = self.job.name if self.job else "limits.wall_s"
        if math.isfinite(self.left_s):
            lines = [f"{name}: {self.left_s:.0f} s left; the run will stop by itself {self._margin_words()}"]
        elif self.job and self.job.fault:
            lines = [f"{name}: its time limit is not known ({self.job.fault}); limits.wall_s can set one"]
        else:
            lines = [f"{name}: no time limit"] if self.job else []
        if self.left_s < self.margin.seconds:
            lines.append("note: that is less than the margin, so the run will stop after its first step")
        return lines

    def _margin_words(self) -> str:
        if self.margin.fixed_s:
            return f"{self.margin.fixed_s:g} s before that"
        return (
            f"in time to save, by what steps and writes take (a margin of {self.margin.seconds:.0f} s until they are "
            f"measured: {self.margin.state_bytes / 1e9:.2g} GB at {GUESSED_BYTES_S / 1e9:g} GB/s)"
        )


def deadline_of(config: Config) -> Deadline:
    """Of this process's run. config: with its model known."""
    limits, data = config.limits, config.data
    batches = data.validation_sequences / data.global_batch if config.log.validation_every_steps else 0.0
    margin = Margin(limits.margin_s, BYTES_A_PARAMETER * parameter_count(config.model), batches)
    return Deadline(limits.wall_s, margin, batch_job())
