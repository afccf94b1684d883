"""The command `preflight`: facts, checks, measurements, one page; exit code 1 if a run would break or take far longer.

facts of all ranks -> rank 0 -> checks --+
load, matrix products, messages,         +-> page
files, codecs: all ranks, each limited --+
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from mpi4py import MPI

from hpcllm import config as run_files
from hpcllm import device
from hpcllm.config import Config
from hpcllm.errors import ConfigError
from hpcllm.hardware.node import allowed_cores, busy_s
from hpcllm.interchange.start import take_model
from hpcllm.layout import custom_text
from hpcllm.messages.gpu_aware import Reach, gpu_aware
from hpcllm.plan.command.planned import complete
from hpcllm.preflight import bandwidth, codecs, matrix, storage
from hpcllm.preflight.checks import check
from hpcllm.preflight.collect import source_hash
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import Finding, Severity, everywhere, merged
from hpcllm.preflight.gather import Crew, open_crew
from hpcllm.preflight.page import Measured, Page
from hpcllm.preflight.run_file import RunFindings, examine, nearest, unreadable, unwritable
from hpcllm.preflight.start import facts_of_all, find_allocation
from hpcllm.slurm import batch_job
from hpcllm.together import on_root
from hpcllm.waiting import Waits
from hpcllm.watch import watching

T = TypeVar("T")
LIMIT_S = 60.0  # of one wait: after that, who does not answer is named
LOOK_S = 0.3  # at what other programs do
SHORT_S = 600.0  # of time left in the job


def run(arguments: argparse.Namespace, world: MPI.Intracomm) -> int:
    """Collective over world. Raises UserError, StallError."""
    tables = on_root(world, lambda: _tables(arguments))
    config = run_files.from_tables(tables) if tables else None
    with watching(world, lambda _: "preflight") as watch:
        crew = open_crew(world, Waits(LIMIT_S, watch=watch))
        page = _examine(crew, config, arguments.quick)
        fit: bool = on_root(world, lambda: _print(page, arguments.json) if page else True)
        crew.free()
    return 0 if fit else 1


def _tables(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The run file, if there is one. Raises ConfigError."""
    if arguments.run:
        return run_files.to_tables(run_files.load(arguments.run, arguments.overrides))
    if arguments.overrides:
        raise ConfigError("--set without a run file; valid: preflight RUN.toml --set table.key=value")
    return {}


def _print(page: Page, as_json: bool) -> bool:
    print(json.dumps(page.as_dict()) if as_json else "\n".join(page.lines()), flush=True)
    return page.is_fit


def _examine(crew: Crew, config: Config | None, quick: bool) -> Page | None:
    """On rank 0, None elsewhere. Collective over crew.world."""
    start_s = time.perf_counter()
    wish = config.run.device if config else "auto"
    busy = 0.0 if quick else _others(crew)
    mine = facts_of_all(crew, wish)
    allocation = find_allocation(crew, mine, source_hash() if crew.leads else "", busy)
    chosen = device.choose(wish, device.slot(crew.node.rank))
    run = _run_findings(crew, config, allocation) if config else None
    measured = [] if quick else _measure(crew, chosen, config, allocation)
    if not allocation:
        return None
    job, findings = _job()
    findings += check(allocation) + (run.findings if run else [])
    findings += [finding for one in measured for finding in one.findings]
    took_s = time.perf_counter() - start_s
    return Page(allocation, job, merged(findings), measured, run.text if run else "", took_s)


def _others(crew: Crew) -> float:
    """Cores of this node's ranks that other programs keep busy while ours sleep. Collective over crew.world.

    What goes on on the other cores of a node that jobs share is not ours to judge.
    """
    cores = set[int]().union(*crew.node.allgather(allowed_cores()))
    crew.arrive("to be quiet")
    before_s, start_s = busy_s(cores), time.perf_counter()
    time.sleep(LOOK_S)
    return (busy_s(cores) - before_s) / (time.perf_counter() - start_s)


def _measure(crew: Crew, chosen: torch.device, config: Config | None, allocation: Allocation | None) -> list[Measured]:
    """Collective over crew.world."""
    devices = crew.world.allreduce(chosen.type != "cpu", MPI.LOR)
    folder = nearest(Path(config.run.folder)) if config else Path.cwd()
    wish = config.communication.gpu_aware if config else "auto"
    reach = _said(crew, "device memory in messages", lambda: gpu_aware(crew.world, chosen, wish)) if devices else None
    where = chosen if reach and reach.direct else torch.device("cpu")
    steps: list[tuple[str, Callable[[], list[Measured | None]]]] = [
        (f"matrix products, {matrix.BUDGET_S:g} s", lambda: [matrix.measure(crew, chosen, allocation)]),
        (f"messages, {bandwidth.BUDGET_S:g} s a round", lambda: [*bandwidth.measure(crew, where, allocation)]),
        (f"files, at most {2 * storage.BUDGET_S:g} s", lambda: [storage.measure(crew, folder, allocation)]),
        (f"codecs, at most {codecs.BUDGET_S:g} s", lambda: [codecs.measure(crew, chosen, allocation)]),
    ]
    found = [one for name, step in steps for one in _said(crew, name, step) if one]
    return [_judged(reach, allocation), *found] if reach and allocation else found


def _said(crew: Crew, name: str, step: Callable[[], T]) -> T:
    if crew.world.rank == 0:
        print(f"hpcllm: preflight: {name} ...", file=sys.stderr, flush=True)
    return step()


def _judged(reach: Reach, allocation: Allocation) -> Measured:
    """Whether MPI reads device memory: what gpu_aware.py found, and what that means here."""
    findings = []
    if not reach.direct:
        severity: Severity = "slow" if len(allocation.nodes) > 1 else "note"
        what = f"MPI cannot read device memory, each message is copied to the host: {reach.why}"
        mend = (
            "an MPI built for the GPUs: Cray MPICH with MPICH_GPU_SUPPORT_ENABLED=1 and mpi4py linked to libmpi_gtl_*, "
            "Open MPI or MPICH built with CUDA or ROCm"
        )
        findings.append(Finding(severity, what, everywhere(allocation), mend))
    text = f"{'MPI reads it' if reach.direct else 'through the host'}: {reach.why}"
    return Measured("device memory", text, {"direct": reach.direct, "why": reach.why}, findings)


def _run_findings(crew: Crew, config: Config, allocation: Allocation | None) -> RunFindings | None:
    """On rank 0. Collective over crew.world. Raises UserError."""
    findings = unwritable(crew, Path(config.run.folder), "run.folder")
    if config.data.store:
        findings += unreadable(crew, Path(config.data.store), "data.store")
    blind = on_root(crew.world, lambda: bool(findings) and not config.model.vocabulary)
    if blind:  # the store says how large the model is, and cannot be read
        return RunFindings("its store cannot be read", findings) if allocation else None
    found = on_root(crew.world, lambda: _examined(config, allocation))
    return RunFindings(found.text, findings + found.findings) if allocation else None


def _examined(config: Config, allocation: Allocation | None) -> RunFindings:
    if not allocation:
        return RunFindings("", [])
    if config.run.start_from:
        config = take_model(config)
    return examine(complete(config), custom_text(config), allocation)


def _job() -> tuple[str, list[Finding]]:
    """The batch job in words, and what is wrong with the time that it has left."""
    job = batch_job()
    if not job:
        return "", []
    job.ask_first()
    left_s = job.end_s - time.monotonic()
    if left_s == float("inf"):
        return job.name, []
    finding = Finding("note", f"{left_s / 60:.0f} min are left of the job", job.name, "sbatch --time=...")
    return f"{job.name}, {left_s / 60:.0f} min left", [finding] if left_s < SHORT_S else []
