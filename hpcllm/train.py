"""The training loop, to be read from top to bottom.

    samples -> engine: forward and backward of every microbatch -> gradients, summed over dp meanwhile
            -> all ranks agree: loss, norm, is it finite, was a stop asked for -> clip, AdamW -> log, validate, save

A run lives in <folder>/<name>. `train` on a folder that has a checkpoint goes on from the newest sound one, so a
requeued job needs no other command.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcllm.assemble import Parts, assemble
from hpcllm.claim import claim_run
from hpcllm.config import Config
from hpcllm.errors import HpcllmError, NonFiniteError
from hpcllm.job import StopSignals
from hpcllm.memory import Live, counting, log_memory, peak_memory_gb
from hpcllm.metrics import Log, Pace, Record, Traffic, open_log
from hpcllm.model.shapes import parameter_count
from hpcllm.optim.learning_rate import learning_rate
from hpcllm.optim.pieces import MODEL
from hpcllm.pipeline.trace import Span, recording, write_trace
from hpcllm.replicas import check_replicas
from hpcllm.resume import resume
from hpcllm.samples import HASH_BITS
from hpcllm.saving import open_saving
from hpcllm.spending import NOTHING_SPENT, Spending, Spent, open_spending
from hpcllm.step import Local, forward_backward
from hpcllm.summary import Summary
from hpcllm.together import on_root, raise_together
from hpcllm.validate import Validation, validate
from hpcllm.wishes import Asked, Wish, keeps_from_queue, open_wishes, wish_of


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step: the same numbers everywhere."""

    loss: float  # nats a token, over the global batch
    gradient_norm: float  # of the loss itself, whatever it was scaled with; not finite where a scaled gradient is not
    wish: Wish  # to save, to stop
    samples: str  # hash of the samples that were read and of their order, see samples.samples_hash
    written: bool  # all ranks are done with the checkpoint under way
    traffic: Traffic  # of the step, summed over the ranks
    spent: Spent  # seconds and joules since the step before, summed over the ranks


def train(config: Config, world: MPI.Intracomm, signals: StopSignals, restart: bool = False) -> Summary:
    """Train as the run file says, from the start or the newest checkpoint. Collective over world.

    signals: an open StopSignals; once one of them came on any rank, or wishes.py has another reason, the run ends after
    the step, its state saved.
    Raises UserError before any work, NonFiniteError, StallError, CheckpointError. Returns the same on every rank.
    """
    with assemble(config, world) as parts, ExitStack() as stack:
        config = parts.config
        claim = stack.enter_context(claim_run(world, parts.run_folder, restart))
        step, position, found = resume(parts)
        log = _start_log(parts, step, stack)
        spending = stack.enter_context(open_spending(parts, log, step))
        saving = stack.enter_context(open_saving(parts, claim, log, found))
        wishes = open_wishes(parts.run_folder, signals, config, log)
        wish = on_root(world, lambda: wishes.at_start(config.run.steps - step))
        pace = Pace(config, world.size, parts.placed.peak_tflops)
        loss, checked, counted, first = math.nan, None, parts.traffic(), step
        while step < config.run.steps and not wish.stops:
            began_s = time.perf_counter()
            rate = learning_rate(step, config.run.steps, config.optimizer)
            traced = step + 1 in config.log.trace_steps
            with recording(parts.engine, traced) as spans, counting(parts, step == first) as live:
                local = forward_backward(parts, step, position)
            before, counted = counted, parts.traffic()  # with the weights that came behind this step's forward pass
            agreed = _agree(
                parts, local, wishes.asked(), counted - before, saving.is_done, spending.passes_done(local.input_s)
            )
            saving.look(agreed.written)
            if not (math.isfinite(agreed.loss) and _timed_update(parts, spending, agreed, rate)):
                saving.finish()  # it is older than this step, and worth having
                raise _not_finite(parts, agreed, local, step + 1, position, saving.newest)
            step, position, loss, wish = step + 1, position + config.data.global_batch, agreed.loss, agreed.wish
            pace.add(time.perf_counter() - began_s, agreed.traffic)
            wishes.heard(wish, step, time.perf_counter() - began_s)

            is_last = wish.stops or step == config.run.steps
            _look_closer(parts, log, step, live, spans, spending)
            if is_last or _due(step, config.log.every_steps):
                _log_step(parts, log, pace, spending, step, agreed, rate)
            measured = None
            if not wish.stops and (is_last or _due(step, config.log.validation_every_steps)):
                parts.optimizer.settle()
                before = parts.traffic()
                with wishes.validating():
                    measured = checked = _validate(parts, step, log, spending)
                counted += parts.traffic() - before  # it is no part of a step
            if is_last or wish.save or _due(step, config.checkpoint.every_steps):
                saving.save(step, position, measured.loss if measured else None, goes_on=not is_last)
                spending.laps.end("checkpoint")
            wishes.saved(saving.newest, saving.longest_s)
        saving.finish()
        wishes.over()
        is_finished = step >= config.run.steps
        if is_finished and (wish.stops or not pace.all_steps):  # a run that is to stop saves first
            unlogged = log if pace.all_steps else None  # else it stands in the log already
            checked = _validate(parts, step, unlogged, spending)
        taken = spending.over(step, "" if is_finished else wish.why)
        return _summary(parts, pace, step, first, loss, checked, saving.newest, wish, taken)


def _summary(
    parts: Parts,
    pace: Pace,
    step: int,
    first: int,
    loss: float,
    checked: Validation | None,
    newest: Path | None,
    wish: Wish,
    taken: Record,
) -> Summary:
    config = parts.config
    return Summary(
        config=config,
        ranks=parts.mesh.world.size,
        bubble=parts.bubble,
        step=step,
        loss=loss,
        validation=checked,
        zstd19_bits_per_byte=parts.store.zstd19_bits_per_byte,
        tokens_per_s=pace.mean_tokens_per_s,
        checkpoint=newest,
        stopped_by="" if step >= config.run.steps else wish.why,
        not_requeued=keeps_from_queue(wish, step - first),
        taken=taken,
    )


def _agree(
    parts: Parts, local: Local, asked: Asked, traffic: Traffic, written: bool = False, spent: Spent = NOTHING_SPENT
) -> Agreed:
    """One small sum over all ranks a step: loss, gradient norm, samples, is a checkpoint written, wishes.

    Collective over the mesh.
    """
    mesh = parts.mesh
    sums = np.array([local.loss, local.squares, local.samples, written, *asked, *traffic, *spent])
    what = "all ranks to agree on a step's loss and gradient norm"
    parts.control.allreduce(mesh.world, sums, lambda: what)
    loss, squares, samples, done = sums[:4].tolist()
    asked, traffic, spent = np.split(sums[4:], [len(asked), len(asked) + len(traffic)])
    each = int(samples) // (mesh.pp.size * mesh.tp.size) % (1 << HASH_BITS)  # all ranks of a replica have read the same
    norm = math.sqrt(squares) / parts.loss_scale.value
    return Agreed(loss, norm, wish_of(asked), f"{each:0{HASH_BITS // 4}x}", done == mesh.world.size, traffic, spent)


def _update(parts: Parts, norm: float, rate: float) -> bool:
    """Update the weights, with gradients of a norm of at most clip_norm (Pascanu et al. 2013, algorithm 1).

    A step in which a gradient overflowed is skipped, and the loss scale halved; False if that would not help. The same
    on all ranks. Collective over the mesh.
    """
    if not math.isfinite(norm):
        return parts.loss_scale.is_dynamic and parts.loss_scale.overflow()
    limit = parts.config.optimizer.clip_norm
    clip = limit / norm if limit and norm > limit else 1.0
    parts.optimizer.update(rate, clip / parts.loss_scale.value)
    parts.loss_scale.good_step()
    return True


def _timed_update(parts: Parts, spending: Spending, agreed: Agreed, rate: float) -> bool:
    """The same; what the step has cost is booked. Collective over the mesh."""
    spending.laps.end("other")
    is_good = _update(parts, agreed.gradient_norm, rate)
    spending.laps.end("optimizer")
    spending.add(agreed.spent)
    return is_good


def _not_finite(
    parts: Parts, agreed: Agreed, local: Local, step: int, position: int, saved: Path | None
) -> NonFiniteError:
    """Who saw it first. Collective over the mesh; only on the way out."""
    where = f"rank {parts.mesh.world.rank} (dp {parts.mesh.dp.rank}, stage {parts.mesh.pp.rank})"
    bad_loss = parts.mesh.world.allgather("" if math.isfinite(local.loss) else where)
    bad_gradient = parts.mesh.world.allgather("" if parts.gradients.is_finite() else where)
    ranks = [name for name in bad_loss if name] or [name for name in bad_gradient if name]
    scaled = parts.loss_scale.is_dynamic and math.isfinite(agreed.loss)
    advice = "precision.compute = 'bf16': the loss scale is 1, and fp16 still overflows; or with " if scaled else ""
    error = NonFiniteError(
        f"step {step}: loss {agreed.loss}, gradient norm {agreed.gradient_norm}, on {', '.join(ranks[:3])}; samples "
        f"{position} to {position + parts.config.data.global_batch - 1}; nothing was written after it. "
        f"Go on from {saved or 'the start'} with {advice}a lower optimizer.learning_rate or a longer warm-up"
    )
    error.everywhere = True
    return error


def _look_closer(
    parts: Parts, log: Log | None, step: int, live: Live | None, spans: list[Span], spending: Spending
) -> None:
    """What is looked at after some steps only: memory, replicas, the trace. Collective over the mesh."""
    config = parts.config
    if live:
        log_memory(parts, log, step, live.peak)
    if _due(step, config.communication.hash_every_steps):
        _check_replicas(parts, step)
    if step in config.log.trace_steps:
        write_trace(parts.run_folder / "trace", step, parts.schedule, parts.mesh, spans, parts.control)
    spending.laps.end("between")


def _check_replicas(parts: Parts, step: int) -> None:
    """Collective over the mesh. Raises ReplicaError."""
    is_sharded = parts.config.optimizer.shard == "all"
    own = {piece.name: piece.values for piece in parts.optimizer.pieces_to_read() if piece.kind == MODEL}
    check_replicas(own if is_sharded else parts.parameters, parts.mesh, parts.control, step, is_sharded)


def _due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _validate(parts: Parts, step: int, log: Log | None, spending: Spending) -> Validation | None:
    result = validate(parts)
    spending.laps.end("validation")
    if log and result:
        log.validation({"step": step, "validation_loss": result.loss, "bits_per_byte": result.bits_per_byte})
    return result


def _start_log(parts: Parts, step: int, stack: ExitStack) -> Log | None:
    """Rank 0's log, to be closed by the stack. Collective over the mesh, so no clock runs while it is opened."""
    run, log, error = parts.config.run, None, None
    if parts.mesh.world.rank == 0:
        try:
            log = stack.enter_context(open_log(parts.run_folder, step, run.steps, parts.config.log.tensorboard))
            _say_what_starts(parts, log)
            (parts.run_folder / "ranks.txt").write_text("\n".join(parts.watch.lines()) + "\n", encoding="utf-8")
        except OSError as failure:
            error = HpcllmError(f"cannot write a log in {str(parts.run_folder)!r}: {failure}")
    raise_together(parts.mesh.world, error)
    return log


def _say_what_starts(parts: Parts, log: Log) -> None:
    config, shape = parts.config, parts.mesh.shape
    model = config.run.start_from or config.model.preset
    log.say(
        f"{config.run.name}: {parameter_count(config.model) / 1e6:.2f} M parameters ({model}), "
        f"dp={shape['dp']} pp={shape['pp']} tp={shape['tp']}, {parts.schedule.name} with "
        f"{config.pipeline.microbatches} microbatches{_chunks(parts)} (bubble {100 * parts.bubble:.0f} %), "
        f"{parts.placed.text}, {_mpi_library()}"
    )
    if reach := parts.placed.reach:
        log.say(f"messages lie in {'device' if reach.direct else 'pinned host'} memory: {reach.why}")
    if config.optimizer.warmup_steps >= config.run.steps:
        log.say(f"note: the learning rate warms up for {config.optimizer.warmup_steps} steps, longer than the run")


def _chunks(parts: Parts) -> str:
    chunks = parts.schedule.placement.chunks
    return f" and {chunks} chunks a rank" if chunks > 1 else ""


def _mpi_library() -> str:
    """'Open MPI v5.0.11': what the library says of itself, cut before the particulars of its build."""
    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())


def _log_step(
    parts: Parts, log: Log | None, pace: Pace, spending: Spending, step: int, agreed: Agreed, rate: float
) -> None:
    """Collective over the mesh: the largest memory of all ranks stands in the line."""
    memory_gb = np.array(peak_memory_gb(parts.device))  # of the device, of the host
    parts.control.allreduce(parts.mesh.world, memory_gb, lambda: "the largest memory over all ranks", MPI.MAX)
    norm = agreed.gradient_norm if math.isfinite(agreed.gradient_norm) else None  # JSON has no word for infinity
    record: Record = {"step": step, "loss": agreed.loss, "learning_rate": rate, "grad_norm": norm}
    if parts.loss_scale.is_dynamic:
        record |= {"loss_scale": parts.loss_scale.value, "skipped_steps": step - parts.optimizer.updates}
    record |= pace.take(step)
    record |= spending.record(record["step_s"])
    record |= {"memory_gb": memory_gb[0].item(), "samples": agreed.samples}
    if parts.device.type != "cpu":
        record["host_memory_gb"] = memory_gb[1].item()
    if log:
        log.step(record)
    spending.laps.end("between")
