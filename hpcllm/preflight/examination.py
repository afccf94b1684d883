"""Examination of an allocation: as each start of a run makes it, and whole, with measurements, for one page.

start                 facts of all ranks -> rank 0 -> breaks: nobody starts, and all say why    well under a second
                                                     slow: a line for each, and on; each rank is bound to its cores
examine_allocation    facts of all ranks -> rank 0 -> checks --+
                      load, matrix products, messages,         +-> page
                      files, codecs: all ranks, each limited --+
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mpi4py import MPI

from hpcllm.checkpoint.huggingface.start import take_model
from hpcllm.config.schema import Config
from hpcllm.errors import HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.mpi.gpu_aware import DeviceAccess, gpu_aware
from hpcllm.mpi.gpu_aware_marker import GPU_AWARE_MPI
from hpcllm.mpi.wait import Waits, job_waits
from hpcllm.mpi.watchdog import open_watchdog
from hpcllm.plan.rank_order.traffic import staged_text
from hpcllm.preflight import bandwidth, codec_test, matrix, storage
from hpcllm.preflight.checks import check
from hpcllm.preflight.collect import Communicators, facts_of_all, find_allocation, open_communicators, source_hash
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import Finding, everywhere, merged
from hpcllm.preflight.page import Measured, Page, one_line
from hpcllm.preflight.run_file import examine, nearest, unreadable, unwritable
from hpcllm.system import device
from hpcllm.system.affinity import Affinity, set_affinity
from hpcllm.system.hardware.node import allowed_cores, busy_s
from hpcllm.system.slurm import batch_job

LOOK_S = 0.3  # at what other programs do
SHORT_S = 600.0  # of time left in the job


def start(world: MPI.Intracomm, wanted: str, limit_s: float) -> Affinity:
    """Check the allocation, then bind this rank to its cores. Collective over world.

    wanted: run.device. limit_s: of waits. Raises ConfigError, StallError, and HpcllmError where a run would break.
    """
    comms = open_communicators(world, Waits(limit_s, observer=job_waits.observer))
    mine = facts_of_all(comms, wanted)
    allocation = find_allocation(comms, mine)
    on_root(world, lambda: _say(check(allocation) if allocation else []))
    affinity = set_affinity(comms.node, mine.device.numa if mine.device else None)
    comms.free()
    return affinity


def _say(findings: list[Finding]) -> None:
    """Raises HpcllmError."""
    for finding in findings:
        if finding.severity == "slow":
            print(f"hpcllm: preflight: {one_line(finding)}", file=sys.stderr, flush=True)
    breaks = [one_line(finding) for finding in findings if finding.severity == "breaks"]
    if breaks:
        more = "; see all of it with `python -m hpcllm preflight`, started in the same way"
        raise HpcllmError(f"this allocation is not fit to run: {'; '.join(breaks)}{more}")


def examine_allocation(world: MPI.Intracomm, config: Config | None, quick: bool) -> Page | None:
    """Examine the allocation, and the run file if there is one; the page is on rank 0. Collective over world.

    quick: without measurements. Raises UserError, StallError.
    """
    with open_watchdog(world, lambda _: "preflight") as watchdog:
        comms = open_communicators(world, Waits(job_waits.limit_s, observer=watchdog))
        page = _examine(comms, config, quick)
        comms.free()
    return page


def _examine(comms: Communicators, config: Config | None, quick: bool) -> Page | None:
    """Examine the allocation; the page is on rank 0, None elsewhere. Collective over comms.world."""
    start_s = time.perf_counter()
    wanted = config.run.device if config else "auto"
    busy = 0.0 if quick else _others(comms)
    mine = facts_of_all(comms, wanted)
    allocation = find_allocation(comms, mine, source_hash() if comms.leads else "", busy)
    chosen = device.choose_device(wanted, device.local_rank(comms.node.rank))
    run = _run_file(comms, config, allocation) if config else None
    measured = [] if quick else _measure(comms, chosen, config, allocation, run)
    if not allocation:
        return None
    job, findings = _job()
    findings += check(allocation)
    findings += [finding for one in ([run] if run else []) + measured for finding in one.findings]
    took_s = time.perf_counter() - start_s
    return Page(allocation, job, merged(findings), measured, run.text if run else "", took_s)


def _others(comms: Communicators) -> float:
    """Cores of this node's ranks that other programs keep busy while ours sleep. Collective over comms.world.

    What goes on on the other cores of a node that jobs share is not ours to judge.
    """
    cores = set[int]().union(*comms.node.allgather(allowed_cores()))
    comms.arrive("to be quiet")
    before_s, start_s = busy_s(cores), time.perf_counter()
    time.sleep(LOOK_S)
    return (busy_s(cores) - before_s) / (time.perf_counter() - start_s)


def _measure(
    comms: Communicators,
    chosen: torch.device,
    config: Config | None,
    allocation: Allocation | None,
    run: Measured | None,
) -> list[Measured]:
    """Measure all there is to measure. Collective over comms.world.

    What finds somebody slow is measured once more, and the second result counts: other jobs' traffic comes and goes.
    """

    def tell(name: str) -> None:
        if comms.world.rank == 0:
            print(f"hpcllm: preflight: {name} ...", file=sys.stderr, flush=True)

    def measure(name: str, step: Callable[[], Sequence[Measured | None]]) -> list[Measured]:
        for again in ("", " again, as some looked slow"):
            tell(f"{name}{again}")
            found = [one for one in step() if one]
            is_slow = any(finding.severity == "slow" for one in found for finding in one.findings)
            if not comms.world.allreduce(is_slow, MPI.LOR):
                break
        return found

    folder = nearest(Path(config.run.folder)) if config else Path.cwd()
    wanted = config.communication.gpu_aware if config else "auto"
    reach = None
    if comms.world.allreduce(chosen.type != "cpu", MPI.LOR):
        tell("device memory in messages")
        # where a run will look: a job whose preflight dies of the trial would never come to train
        marked = Path(config.run.folder) / config.run.name if config else Path.cwd()
        reach = gpu_aware(comms.world, chosen, wanted, marked)
    where = chosen if reach and reach.direct else torch.device("cpu")
    measured = measure(f"matrix products, {matrix.BUDGET_S:g} s", lambda: [matrix.measure(comms, chosen, allocation)])
    measured += measure(
        f"messages, {bandwidth.BUDGET_S:g} s a round", lambda: bandwidth.measure(comms, where, allocation)
    )
    measured += measure(
        f"files, at most {2 * storage.BUDGET_S:g} s", lambda: [storage.measure(comms, folder, allocation)]
    )
    measured += measure(
        f"codecs, at most {codec_test.BUDGET_S:g} s", lambda: [codec_test.measure(comms, chosen, allocation)]
    )
    judged = _judged(reach, allocation, run) if reach and allocation else None
    return [*([judged] if judged else []), *measured]


def _judged(reach: DeviceAccess, allocation: Allocation, run: Measured | None) -> Measured:
    """Result of the trial in which MPI reads device memory, as a measurement. run: what the run file asks for."""
    findings = []
    if not reach.direct and allocation.size > 1:
        what = f"MPI cannot read device memory, each message is copied to the host: {reach.why}"
        if run and "staged_s" in run.facts and len(allocation.nodes) == 1:
            what = f"{staged_text(run.facts['staged_s'])}: {reach.why}"
        findings.append(Finding("slow", what, everywhere(allocation), GPU_AWARE_MPI))
    text = f"{'MPI reads it' if reach.direct else 'through the host'}: {reach.why}"
    return Measured("device memory", text, {"direct": reach.direct, "why": reach.why}, findings)


def _run_file(comms: Communicators, config: Config, allocation: Allocation | None) -> Measured:
    """Examine the run file; findings on rank 0. Collective over comms.world. Raises UserError."""
    findings = unwritable(comms, Path(config.run.folder), "run.folder")
    if config.data.store:
        findings += unreadable(comms, Path(config.data.store), "data.store")

    def examined() -> Measured:
        assert allocation, "is on rank 0"
        if findings and not config.model.vocabulary:  # the store says how large the model is
            return Measured("run file", "its store cannot be read", {})
        return examine(take_model(config), allocation)

    found = on_root(comms.world, examined)
    return dataclasses.replace(found, findings=findings + found.findings)


def _job() -> tuple[str, list[Finding]]:
    """The batch job in words, and what is wrong with the time that it has left."""
    job = batch_job()
    if not job:
        return "", []
    job.ask_first()
    left_s = job.end_s - time.monotonic()
    if left_s == math.inf:
        return job.name, []
    finding = Finding("note", f"{left_s / 60:.0f} min are left of the job", job.name, "sbatch --time=...")
    return f"{job.name}, {left_s / 60:.0f} min left", [finding] if left_s < SHORT_S else []
