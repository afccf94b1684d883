"""Demands of one run file on this allocation: ranks, memory, shared memory, files.

    layout      does it fit so many ranks                      schedule too
    memory      predicted for each rank, against its device or its node
    /dev/shm    windows in which the ranks of a node sum       gradients, gathered parameters
    files       store readable on every node, checkpoints writable, room for those that will be kept

For rank 0, but for files, which the first rank of each node tries.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hpcllm.config.schema import Config
from hpcllm.errors import MeshError, ScheduleError
from hpcllm.model.shapes import parameter_count
from hpcllm.mpi.mesh_axes import coordinates
from hpcllm.mpi.rank_names import name_ranks
from hpcllm.plan.memory.predict import ITEM_BYTES, predict
from hpcllm.plan.memory.sizes import RankMemory
from hpcllm.plan.rank_order.traffic import staged_s
from hpcllm.plan.resolve import resolve
from hpcllm.preflight.collect import Communicators
from hpcllm.preflight.facts import Allocation, Node
from hpcllm.preflight.findings import MOST_NODES, Finding
from hpcllm.preflight.page import Measured
from hpcllm.system.hardware.node import node_name
from hpcllm.system.slurm import batch_job, nodes_text
from hpcllm.system.text import size_text

LIBRARIES_BYTES = 500 << 20  # of the interpreter, PyTorch and MPI, each rank
WINDOW_BYTES = 4 << 20  # of small windows for messages of each kind, each rank
STATE_BYTES = 8  # of AdamW in a checkpoint, each parameter; and 4 of a master where weights are of 16 bit


def examine(config: Config, allocation: Allocation) -> Measured:
    """Check a run file against the allocation. Reads data.store's vocabulary, pipeline.file and the disk's free space.

    config: with the model that it starts from.
    """
    try:
        resolved = resolve(config, allocation.size)
        config, schedule, mesh = resolved.config, resolved.schedule, resolved.config.mesh
        sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
        of_axes = [coordinates(rank, sizes, mesh.order) for rank in range(allocation.size)]
        places = [(place["pp"], place["tp"]) for place in of_axes]
        memories = {place: predict(config, schedule, *place) for place in sorted(set(places))}
    except (MeshError, ScheduleError) as error:
        finding = Finding("breaks", f"the run file does not fit: {error}", f"{allocation.size} ranks", "see above")
        return Measured("run file", "its layout does not fit", {}, [finding])
    of_ranks = [memories[place] for place in places]
    largest = max(memory.total for memory in memories.values())
    text = f"dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, {size_text(largest)} of tensors a rank at most (predicted)"
    findings = [*_memory(of_ranks, allocation), *_shared(config, of_ranks, places, allocation)]
    findings += [*_disk(config), *_requeue(config)]
    return Measured("run file", text, {"staged_s": staged_s(config, schedule.placement)}, findings)


def unreadable(comms: Communicators, path: Path, what: str) -> list[Finding]:
    """A file that the first rank of each node has to read; findings on rank 0. Collective over comms.world."""
    fault = ""
    if comms.leads:
        try:
            with path.open("rb", buffering=0) as file:
                file.read(1)
        except OSError as error:
            fault = f"{error.strerror}"
    fix = "`python -m hpcllm prepare` writes a store; let it be on a path that all nodes see, not on a local disk"
    return _told(comms, f"cannot read {what} = {str(path)!r}", fault, fix)


def unwritable(comms: Communicators, folder: Path, what: str) -> list[Finding]:
    """A folder, or its nearest parent that exists, to write in on each node; findings on rank 0. Collective."""
    fault = ""
    if comms.leads and not os.access(nearest(folder), os.W_OK | os.X_OK):
        fault = f"no right to write in {str(nearest(folder))!r}"
    return _told(comms, f"cannot write {what} = {str(folder)!r}", fault, "another run.folder, or chmod u+wx")


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _told(comms: Communicators, what: str, fault: str, fix: str) -> list[Finding]:
    rows = comms.leaders.gather((node_name(), fault)) if comms.leads else None
    by_fault: dict[str, list[str]] = {}
    for name, found in rows or []:
        if found:
            by_fault.setdefault(found, []).append(name)
    return [Finding("breaks", f"{what}: {f}", nodes_text(names, MOST_NODES), fix) for f, names in by_fault.items()]


def _memory(of_ranks: list[RankMemory], allocation: Allocation) -> Iterator[Finding]:
    fix = "`python -m hpcllm memory RUN.toml` says what takes it and which key lowers it"
    short: dict[tuple[float, int], list[int]] = {}  # needs and has, of a device
    full: list[tuple[float, int, Node]] = []
    for node in allocation.nodes:
        facts = node.facts.ranks
        users = Counter(mine.device.identity for mine in facts if mine.device)
        for rank, mine in zip(node.ranks, facts, strict=True):
            if mine.device and mine.device.memory_bytes:
                need = of_ranks[rank].total * users[mine.device.identity]
                if need > mine.device.memory_bytes:
                    short.setdefault((need, mine.device.memory_bytes), []).append(rank)
        on_host = (0 if mine.device else of_ranks[rank].total for rank, mine in zip(node.ranks, facts, strict=True))
        need = sum(on_host) + LIBRARIES_BYTES * len(node.ranks)
        memory = node.facts.hardware.memory
        has = min(memory.usable_bytes, node.gauges.available_bytes + LIBRARIES_BYTES * len(node.ranks))
        if memory.total_bytes and need > has:
            full.append((need, has, node))
    for (need, has), ranks in short.items():
        what = f"the run needs {size_text(need)} of a device (predicted), which has {size_text(has)}"
        yield Finding("breaks", what, name_ranks(ranks, 3), fix)
    if full:
        need, has, node = max(full, key=lambda row: row[0] - row[1])
        what = f"the run needs {size_text(need)} on node {node.name} (predicted), which has {size_text(has)}"
        yield Finding("breaks", what, nodes_text([node.name for _, _, node in full], MOST_NODES), fix)


def _shared(
    config: Config, of_ranks: list[RankMemory], places: list[tuple[int, int]], allocation: Allocation
) -> Iterator[Finding]:
    """Node-shared memory for gradients and gathered weights (collectives/node.py), where it does not fit."""
    shard, short = config.optimizer.shard, []
    for node in allocation.nodes:
        if not node.facts.hardware.memory.shared_bytes or len(node.ranks) == 1:
            continue
        need: float = WINDOW_BYTES * len(node.ranks)
        replicas = Counter(places[rank] for rank in node.ranks)  # of one place in a replica on this node
        for rank, mine in zip(node.ranks, node.facts.ranks, strict=True):
            if replicas[places[rank]] > 1 and not mine.device:
                need += of_ranks[rank].gradients if shard in ("none", "states") else 0
                need += of_ranks[rank].parameters if shard in ("states", "states+gradients") else 0
        if need > node.gauges.shared_free_bytes:
            short.append((need, node))
    if short:
        need, node = max(short, key=lambda row: row[0])
        free = size_text(node.gauges.shared_free_bytes)
        what = f"/dev/shm of {node.name} has {free} free, this run would use {size_text(need)}: sums in private memory"
        fix = "enlarge it (container: --shm-size; mount -o remount,size=...), or optimizer.shard = 'states+gradients'"
        yield Finding("slow", what, nodes_text([node.name for _, node in short], MOST_NODES), fix)


def _disk(config: Config) -> Iterator[Finding]:
    folder = nearest(Path(config.run.folder))
    item_bytes = ITEM_BYTES[config.precision.compute]
    each = parameter_count(config.model) * (item_bytes + STATE_BYTES + (4 if item_bytes == 2 else 0))
    need, free = each * (config.checkpoint.keep + 1), shutil.disk_usage(folder).free
    if need > free:
        what = f"{folder} has {size_text(free)} free, {config.checkpoint.keep} checkpoints and one being written need "
        fix = "another run.folder, a lower checkpoint.keep, or delete something"
        yield Finding("breaks", what + f"about {size_text(need)}", "run.folder", fix)


def _requeue(config: Config) -> Iterator[Finding]:
    if config.run.requeue and not (batch_job() and shutil.which("scontrol")):
        what = "run.requeue = true, but this is no Slurm job or `scontrol` is not on PATH: nobody puts the job back"
        yield Finding("note", what, "rank 0", "submit by sbatch, or start the same command again by hand")
