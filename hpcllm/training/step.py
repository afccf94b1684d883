"""One step on one rank, in three calls of the loop.

forward_backward   samples -> passes of every microbatch, gradients summed over dp meanwhile -> Local
agree              one small sum over all ranks: loss, norm, samples, requests, traffic, time  -> Agreed
update             clip, AdamW; a step whose gradients overflowed is skipped

Weights, activations and their gradients are fp32, bf16 or fp16; sums of gradients, master weights and AdamW are fp32
always. fp16 has five exponent bits: gradients below 2^-24 become zero. The loss is multiplied by a scale, and so is
every gradient of it; the update divides by it. Where the scale is too large a gradient becomes infinite: all ranks see
that in the norm they agree on, skip the step and halve the scale; after many good steps it is doubled.

    scale      65536   65536   32768   32768  ...  32768   65536
    norm        4.1     inf     4.0     3.9         3.1     3.1       (divided by the scale)
    update      yes     no      yes     yes         yes     yes

Source: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcllm.codecs.gpu.device_codecs import damage_words
from hpcllm.config.schema import Config
from hpcllm.data.loader import HASH_BITS, Batch
from hpcllm.errors import CodecError, NonFiniteError
from hpcllm.mpi.wait import WORK, Waits
from hpcllm.optim.replica_check import check_state
from hpcllm.training.log import Traffic
from hpcllm.training.requests import RequestCounts, Requests
from hpcllm.training.step_timer import NOTHING_SPENT, Spent

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext

log = logging.getLogger(__name__)
LARGEST_SCALE = 2.0**32  # gradients that are all zero would otherwise double it without end


@dataclass
class LossScale:
    """Factor of the loss; the same on all ranks, for it follows from what they agree on."""

    value: float = 1.0
    double_after: int = 0  # steps without overflow; 0: it stays as it is
    good_steps: int = 0  # since it last changed

    @property
    def is_dynamic(self) -> bool:
        return self.double_after > 0

    def restore(self, value: float, good_steps: int) -> None:
        """Go on with the scale of a saved fp16 run."""
        if self.is_dynamic:
            self.value, self.good_steps = value, good_steps

    def good_step(self) -> None:
        """No gradient overflowed."""
        if not self.is_dynamic:  # nothing follows from the count, and a checkpoint should not differ by it
            return
        self.good_steps += 1
        if self.good_steps == self.double_after:
            self.value, self.good_steps = min(2 * self.value, LARGEST_SCALE), 0

    def overflow(self) -> bool:
        """A gradient overflowed: halve the scale; false if it cannot go lower than the 1 that it was."""
        could_be_halved = self.value > 1.0
        self.value, self.good_steps = max(self.value / 2, 1.0), 0
        return could_be_halved


def make_loss_scale(config: Config) -> LossScale:
    """Dynamic for fp16; a constant 1 for types with the range of fp32."""
    if config.precision.compute != "fp16":
        return LossScale()
    return LossScale(config.precision.loss_scale, config.precision.loss_scale_steps)


@dataclass(frozen=True)
class Local:
    """Result of a step's passes on one rank."""

    loss: float  # this rank's part of the mean over the global batch; 0 on all but the last stage
    squares: float  # sum over the gradients that this rank counts (Gradients.squared_norm)
    samples: int  # hash of the samples that this rank read, see loader.samples_hash
    input_s: float  # seconds of reading them, or the next ones
    next_counted: int = 0  # targets that count in the samples that this rank has read ahead
    counted: int = 0  # targets that count in the global batch of this step, the same on every rank
    figures: tuple[float, ...] = ()  # parts of the objective's figures, as the loss is


@dataclass(frozen=True)
class Agreed:
    """Result of a step, the same numbers on every rank."""

    loss: float  # nats a counted token, or what the objective says, over the global batch
    gradient_norm: float  # of the loss itself, whatever it was scaled with; not finite where a scaled gradient is not
    requests: Requests  # to save, to stop
    samples: str  # hash of the samples that were read and of their order, see loader.samples_hash
    is_written: bool  # all ranks are done with the checkpoint under way
    traffic: Traffic  # of the step, with the weights gathered behind its forward pass; summed over the ranks
    spent: Spent  # seconds and joules since the step before, summed over the ranks
    figures: tuple[float, ...] = ()  # of the objective, means over the global batch


def forward_backward(run: RunContext, step: int, position: int) -> Local:
    """Sum up the gradients of the batch at `position`, times the loss scale.

    step: number of steps that the run has made, which decides if traffic is still exact. Collective over the mesh.
    Raises StallError; CodecError on a rank that decoded damaged bytes in this step.
    """
    communication, before_s = run.config.communication, run.loader.input_s
    exact = step < communication.exact_steps
    run.engine.set_exact(exact)
    run.optimizer.weights.exact = exact
    log.debug("step %d, samples from %d", step + 1, position)
    batch = run.loader.take(position)
    counted = _counted(run, batch)
    units = run.config.data.global_batch if run.objective.is_per_sample else counted
    criteria = run.objective.criteria(run, batch.rows)
    run.gradients.begin(step, exact)
    scale = run.loss_scale.value / units
    sums = run.engine.run(run.schedule, batch.inputs, batch.targets, scale, batch.documents, criteria)
    run.loader.read_ahead(position)
    run.gradients.finish()
    # the one place of a step where the host waits for everything that it has handed to the device: the limit is that of
    # ranks that compute
    words = damage_words(sums.device)
    rest = torch.stack([run.gradients.squared_norm(), *(word.double().squeeze() for _, word in words)])
    waits = Waits(run.config.limits.stall_s * WORK, observer=run.watchdog)
    found = waits.settle(torch.cat([sums, rest]).tolist, "end the step")
    totals, (squares, *tiles) = found[: len(sums)], found[len(sums) :]
    if damages := [codec.damage(int(tile)) for (codec, _), tile in zip(words, tiles, strict=True) if tile]:
        raise CodecError(f"rank {run.mesh.world.rank}: {damages[0]}")
    loss, *figures = (total / units for total in totals)
    ahead, input_s = run.loader.ahead, run.loader.input_s - before_s
    return Local(loss, squares, batch.hash, input_s, ahead.counted if ahead else 0, counted, tuple(figures))


def _counted(run: RunContext, batch: Batch) -> int:
    """Return how many targets of the global batch count, at least 1, for the loss is divided by it.

    The step before has agreed on it, together with its own results; only the first step asks. Collective over the mesh.
    """
    position, count = run.loader.counted
    if position != batch.position:
        sums = np.array([float(batch.counted)])
        run.control.allreduce(run.mesh.world, sums, lambda: "all ranks to count the targets of a step")
        count = _of_replicas(run, sums[0])
    return max(1, count)


def _of_replicas(run: RunContext, total: float) -> int:
    """Sum over the replicas, from that over all ranks: the ranks of a replica have read the same."""
    return int(total) // (run.mesh.pp.size * run.mesh.tp.size)


def agree(
    run: RunContext,
    local: Local,
    requests: RequestCounts,
    traffic: Traffic,
    is_written: bool = False,
    spent: Spent = NOTHING_SPENT,
) -> Agreed:
    """Sum the results of all ranks. is_written: this rank is done with the checkpoint under way.

    Collective over the mesh.
    """
    mesh = run.mesh
    own = [local.loss, local.squares, local.samples, is_written, local.next_counted, *local.figures]
    sums = np.array([*own, *requests, *traffic, *spent])
    run.control.allreduce(mesh.world, sums, lambda: "all ranks to agree on a step's loss and gradient norm")
    loss, squares, samples, written, counted, *figures = sums[: len(own)].tolist()
    requests, traffic, spent = np.split(sums[len(own) :], [len(requests), len(requests) + len(traffic)])
    each = _of_replicas(run, samples) % (1 << HASH_BITS)
    if ahead := run.loader.ahead:
        run.loader.counted = ahead.position, _of_replicas(run, counted)
    return Agreed(
        loss=loss,
        gradient_norm=math.sqrt(squares) / run.loss_scale.value,
        requests=Requests.from_sums(requests),
        samples=f"{each:0{HASH_BITS // 4}x}",
        is_written=written == mesh.world.size,
        traffic=traffic,
        spent=spent,
        figures=tuple(figures),
    )


def update(run: RunContext, norm: float, rate: float) -> bool:
    """Update the weights, with gradients of a norm of at most clip_norm (Pascanu et al. 2013, algorithm 1).

    A step in which a gradient overflowed is skipped and the loss scale halved; returns false if that would not help,
    on all ranks alike. Collective over the mesh.
    """
    if not math.isfinite(norm):
        return run.loss_scale.is_dynamic and run.loss_scale.overflow()
    limit = run.config.optimizer.clip_norm
    clip = limit / norm if limit and norm > limit else 1.0
    run.optimizer.update(rate, clip / run.loss_scale.value)
    run.loss_scale.good_step()
    return True


def compare_replicas(run: RunContext, step: int) -> None:
    """Compare all that replicas and ranks of tp hold alike. Collective over the mesh. Raises ReplicaError."""
    pieces = run.optimizer.pieces_to_read()  # settles the weights
    check_state(run.parameters, pieces, run.mesh, run.control, step, run.config.optimizer.shard)


def not_finite(
    run: RunContext, agreed: Agreed, local: Local, step: int, position: int, saved: Path | None
) -> NonFiniteError:
    """Make the error that names the ranks that saw it first. Collective over the mesh; only on the way out."""
    where = f"rank {run.mesh.world.rank} (dp {run.mesh.dp.rank}, stage {run.mesh.pp.rank})"
    bad_loss = run.mesh.world.allgather("" if math.isfinite(local.loss) else where)
    bad_gradient = run.mesh.world.allgather("" if run.gradients.is_finite() else where)
    ranks = [name for name in bad_loss if name] or [name for name in bad_gradient if name]
    scaled = run.loss_scale.is_dynamic and math.isfinite(agreed.loss)
    advice = "precision.compute = 'bf16': the loss scale is 1, and fp16 still overflows; or with " if scaled else ""
    error = NonFiniteError(
        f"step {step}: loss {agreed.loss}, gradient norm {agreed.gradient_norm}, on {', '.join(ranks[:3])}; samples "
        f"{position} to {position + run.config.data.global_batch - 1}; nothing was written after it. "
        f"Go on from {saved or 'the start'} with {advice}a lower optimizer.learning_rate or a longer warm-up"
    )
    error.everywhere = True
    return error
