"""The training loop, to be read from top to bottom.

    samples -> engine: forward and backward of every microbatch -> gradients, summed over dp meanwhile
            -> all ranks agree: loss, norm, is it finite, requests to stop -> clip, AdamW -> log, validate, save

A run lives in <folder>/<name>. `train` on a folder that has a checkpoint goes on from the newest sound one, so a
requeued job needs no other command.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from hpcllm.config.schema import Config
from hpcllm.errors import HpcllmError
from hpcllm.evaluation.held_out import Validation
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed
from hpcllm.mpi.wait import job_waits
from hpcllm.optim.adamw import learning_rate
from hpcllm.pipeline.trace import Span, recording, write_trace
from hpcllm.system.job import StopSignals
from hpcllm.training.accounting import Accounting, open_accounting
from hpcllm.training.compatibility import as_begun
from hpcllm.training.log import Log, Pace, Record, TrafficCounter, open_log
from hpcllm.training.memory import Live, counting, log_memory, peak_memory_gb
from hpcllm.training.objective import NEXT_TOKEN, Objective
from hpcllm.training.requests import make_listener
from hpcllm.training.resume import resume
from hpcllm.training.run_info import start_lines
from hpcllm.training.run_lock import lock_run
from hpcllm.training.saving import open_saving
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import Agreed, agree, compare_replicas, forward_backward, not_finite, update
from hpcllm.training.summary import Summary

if TYPE_CHECKING:
    from hpcllm.training.task_figures import TaskFigures


def train(
    config: Config,
    world: MPI.Intracomm,
    signals: StopSignals,
    restart: bool = False,
    wide: bool = False,
    objective: Objective = NEXT_TOKEN,
) -> Summary:
    """Train as the run file says, from the start or the newest checkpoint. Collective over world.

    signals: an open StopSignals; once one of them came on any rank, or there is another reason (requests.py), the run
    ends after the step, its state saved. wide: lines for people are as long as they are, not of 80 columns. objective:
    what is learned, see objective.py.
    Raises UserError before any work, NonFiniteError, StallError, CheckpointError. Returns the same on every rank.
    """
    with (
        open_run(config if restart else on_root(world, lambda: as_begun(config)), world, objective) as run,
        ExitStack() as stack,
    ):
        config, lock = run.config, stack.enter_context(lock_run(world, run.run_folder, restart))
        tasks, (step, position, found) = _open_tasks(run), resume(run)
        log = _open_log(run, step, wide, stack)
        accounting = stack.enter_context(open_accounting(run, log, step))
        saving = stack.enter_context(open_saving(run, lock, log, found))
        listener = make_listener(run.run_folder, signals, config, log)
        requests = on_root(world, lambda: listener.at_start(config.run.steps - step))
        pace, traffic = Pace(config, world.size, run.device_setup.peak_tflops), TrafficCounter(run.traffic)
        loss, checked, first = math.nan, None, step
        while step < config.run.steps and not requests.stop:
            began_s, rate = time.perf_counter(), learning_rate(step, config.run.steps, config.optimizer)
            with (
                recording(run.engine, step + 1 in config.log.trace_steps) as spans,
                counting(run, step == first and not config.model.compile) as memory,
            ):
                local = forward_backward(run, step, position)
            spent = accounting.end_passes(local.input_s)
            agreed = agree(run, local, listener.poll(), traffic.since_last(), saving.is_done, spent)
            saving.before_update(agreed.is_written)
            accounting.timer.end("other")
            if not (math.isfinite(agreed.loss) and update(run, agreed.gradient_norm, rate)):
                saving.finish()  # it is older than this step, and worth having
                raise not_finite(run, agreed, local, step + 1, position, saving.newest)
            accounting.end_update(agreed.spent)
            step, position, loss = step + 1, position + config.data.global_batch, agreed.loss
            step_s, requests = time.perf_counter() - began_s, agreed.requests
            job_waits.patience = 1.0  # kernels are compiled by now
            pace.add(step_s, agreed.traffic, local.counted)
            listener.agreed(requests, step, step_s)
            saving.stepped(step_s)

            # between two steps
            is_last = requests.stop or step == config.run.steps
            _inspect(run, log, step, memory, spans)
            accounting.timer.end("between")
            if is_last or _is_due(step, config.log.every_steps):
                _log_step(run, log, pace, accounting, step, agreed, rate)
            validation = None
            if not requests.stop and _is_measured(config, step, is_last):
                with listener.timing_validation():
                    validation = _measure(run, tasks, log, accounting, traffic, step, is_last)
                checked = validation or checked
            if is_last or requests.save or _is_due(step, config.checkpoint.every_steps):
                saving.save(step, position, validation.loss if validation else None, goes_on=not is_last)
                accounting.timer.end("checkpoint")
            listener.saved(saving.newest, saving.longest_s)
        saving.finish()
        listener.close()
        is_finished = step >= config.run.steps
        if is_finished and (requests.stop or not pace.all_steps):  # a run that is to stop saves first
            # without a step in this start the log has the result already
            checked = _validate(run, log if pace.all_steps else None, accounting, traffic, step)
        on_root(world, lambda: lock.record(step, config.run.steps, saving.newest))
        stopped_by = "" if is_finished else requests.why
        return Summary(
            config=config,
            ranks=world.size,
            bubble=run.bubble,
            step=step,
            loss=loss,
            validation=checked,
            zstd19_bits_per_byte=run.store.zstd19_bits_per_byte,
            is_chat=run.store.header.kind == "chat",
            tokens_per_s=pace.mean_tokens_per_s,
            checkpoint=saving.newest,
            stopped_by=stopped_by,
            not_requeued=requests.why_not_requeued(step - first),
            taken=accounting.close(step, stopped_by),
        )


def _open_log(run: RunContext, step: int, wide: bool, stack: ExitStack) -> Log | None:
    """Open rank 0's log, to be closed by the stack. Collective over the mesh, so no clock runs while it is opened."""
    log, error = None, None
    if run.mesh.world.rank == 0:
        try:
            config = run.config
            log = stack.enter_context(open_log(run.run_folder, step, config.run.steps, config.log.trackers, wide))
            for line in start_lines(run):
                log.print(line)
            (run.run_folder / "ranks.txt").write_text("\n".join(run.watchdog.lines()) + "\n", encoding="utf-8")
        except BrokenPipeError:  # of standard output, which the job says
            raise
        except OSError as failure:
            error = HpcllmError(f"cannot write a log in {str(run.run_folder)!r}: {failure}")
    raise_if_any_failed(run.mesh.world, error)
    return log


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _inspect(run: RunContext, log: Log | None, step: int, memory: Live | None, spans: list[Span]) -> None:
    """Measure memory, compare replicas, write a trace: after some steps only. Collective over the mesh.

    A trace that cannot be written is said, and no reason to end. Raises ReplicaError, StallError.
    """
    config = run.config
    if memory:
        log_memory(run, log, step, memory.peak)
    if _is_due(step, config.communication.hash_every_steps):
        compare_replicas(run, step)
    if step in config.log.trace_steps:
        try:
            write_trace(run.run_folder / "trace", step, run.schedule, run.mesh, spans, run.control)
        except HpcllmError as error:
            if not error.everywhere:  # a rank that did not answer
                raise
            if log:
                log.print(f"no trace of step {step}: {error}")


def _log_step(
    run: RunContext, log: Log | None, pace: Pace, accounting: Accounting, step: int, agreed: Agreed, rate: float
) -> None:
    """Log a step, with the largest memory of all ranks. Collective over the mesh."""
    memory_gb = np.array(peak_memory_gb(run.device))  # of the device, of the host
    run.control.allreduce(run.mesh.world, memory_gb, lambda: "the largest memory over all ranks", MPI.MAX)
    norm = agreed.gradient_norm if math.isfinite(agreed.gradient_norm) else None  # JSON has no word for infinity
    record: Record = {"step": step, "loss": agreed.loss, "learning_rate": rate, "grad_norm": norm}
    record |= zip(run.objective.figures, agreed.figures, strict=True)
    record |= run.objective.facts(run)
    if run.loss_scale.is_dynamic:
        record |= {"loss_scale": run.loss_scale.value, "skipped_steps": step - run.optimizer.updates}
    record |= pace.take(step)
    record |= accounting.record(record["step_s"])
    record |= {"memory_gb": memory_gb[0].item(), "samples": agreed.samples}
    if run.device.type != "cpu":
        record["host_memory_gb"] = memory_gb[1].item()
    if log:
        log.step(record)
        for text in record.get("texts", ()):
            log.print(f"  {text['prompt']!r} -> {text['text']!r}, reward {text['reward']:g}")
    accounting.timer.end("between")


def _validate(
    run: RunContext, log: Log | None, accounting: Accounting, traffic: TrafficCounter, step: int
) -> Validation | None:
    """Measure the held-out loss and log it; its messages are no step's. Collective over the mesh."""
    with traffic.paused():
        result = run.objective.validate(run)
    accounting.timer.end("validation")
    if log and result:
        log.validation({"step": step, **result.as_dict()})
    return result


def _is_measured(config: Config, step: int, is_last: bool) -> bool:
    return is_last or _is_due(step, config.log.validation_every_steps) or _is_due(step, config.evaluation.every_steps)


def _open_tasks(run: RunContext) -> TaskFigures | None:
    """Read and check the tasks of a run; None if it has none. Collective over the mesh. Raises UserError."""
    if not run.config.evaluation.tasks:
        return None
    # here, for most runs have none, and some fifteen modules fewer are a start that asks the file system less
    from hpcllm.training.task_figures import open_tasks

    return open_tasks(run)


def _measure(
    run: RunContext,
    tasks: TaskFigures | None,
    log: Log | None,
    accounting: Accounting,
    traffic: TrafficCounter,
    step: int,
    is_last: bool,
) -> Validation | None:
    """Measure what is due after a step: the held-out loss, the tasks. Collective over the mesh."""
    run.optimizer.settle()  # what is still under way are messages of a step
    validation = None
    if is_last or _is_due(step, run.config.log.validation_every_steps):
        validation = _validate(run, log, accounting, traffic, step)
    if tasks and (is_last or _is_due(step, run.config.evaluation.every_steps)):
        with traffic.paused():  # its messages are no step's
            tasks.measure(log, step)
        accounting.timer.end("validation")
    return validation
