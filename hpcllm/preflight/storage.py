"""The file system of checkpoints: one rank of each node writes a file at the same time, and reads another's.

node 0   write 0 ....  |   read 1 ....       what a node has just written lies in its own memory, so it reads what
node 1   write 1 ..    |   read 2 ..         its neighbour wrote
node 2   write 2 ...   |   read 0 ...        aggregate: all bytes / seconds of the slowest; cut at BUDGET_S a node
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpcllm.mpi.collective_errors import on_root
from hpcllm.preflight.collect import Communicators
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import Finding, slow_ones, without
from hpcllm.preflight.page import Measured
from hpcllm.system.text import counted

PIECE_BYTES, MOST_PIECES = 4 << 20, 16
BUDGET_S = 3.0
MUCH_SLOWER = 0.5  # a file system is shared with others: nodes that reach less than half of the usual speed are told
Row = tuple[int, float, float, str]  # bytes, seconds to write, seconds to read, what failed


def measure(comms: Communicators, folder: Path, allocation: Allocation | None) -> Measured | None:
    """The result, on rank 0; leaves nothing behind. Collective over comms.world. Raises StallError, CollectiveError."""

    def new_folder() -> tuple[Path | None, str]:
        try:
            return Path(tempfile.mkdtemp(prefix=".hpcllm-preflight-", dir=folder)), ""
        except OSError as error:
            return None, f"{error.strerror}"

    inside, fault = on_root(comms.world, new_folder)
    if not inside:
        return judge([(0, 0.0, 0.0, fault)] * len(allocation.nodes), folder, allocation) if allocation else None
    try:
        rows = _write_and_read(comms, inside)
    finally:
        if comms.world.rank == 0:
            shutil.rmtree(inside, ignore_errors=True)
    return judge(rows, folder, allocation) if allocation else None


def judge(rows: Sequence[Row], folder: Path, allocation: Allocation) -> Measured:
    """rows: of each node. Pure."""
    names = [node.name for node in allocation.nodes]
    findings = [
        Finding("breaks", f"cannot write and read in {str(folder)!r}: {fault}", f"node {name}", "another folder")
        for name, (_, _, _, fault) in zip(names, rows, strict=True)
        if fault
    ]
    good = [row for row in rows if not row[3]]
    if not good:
        return Measured("file system", f"nothing could be written in {folder}", {}, findings)
    speeds = [math.nan if fault else size / max(write_s, 1e-9) / 1e9 for size, write_s, _, fault in rows]
    for which, share in slow_ones(speeds):
        if share >= MUCH_SLOWER:
            what = f"node {names[which]} writes {speeds[which]:.3g} GB/s, {100 * share:.0f} % less than most"
            findings.append(Finding("note", what, f"node {names[which]}", without(allocation, [names[which]])))
    total = sum(size for size, _, _, _ in good)
    write = total / max(*(write_s for _, write_s, _, _ in good), 1e-9) / 1e9
    read = total / max(*(read_s for _, _, read_s, _ in good), 1e-9) / 1e9
    cut = any(size < PIECE_BYTES * MOST_PIECES for size, _, _, _ in good)
    known = [speed for speed in speeds if not math.isnan(speed)]
    text = (
        f"{write:.3g} GB/s written and {read:.3g} GB/s read by {counted(len(good), 'node')} together "
        f"(slowest node {min(known):.3g} GB/s), in {folder}{f'; cut off after {BUDGET_S:g} s' if cut else ''}"
    )
    facts = {"write_gb_s": write, "read_gb_s": read, "slowest_node_gb_s": min(known), "bytes": total, "cut": cut}
    return Measured("file system", text, facts, findings)


def _write_and_read(comms: Communicators, folder: Path) -> list[Row]:
    """A row a node, on rank 0. Collective over comms.world."""
    size, write_s, read_s, fault = 0, 0.0, 0.0, ""
    comms.arrive("to write files")
    if comms.leads:
        try:
            size, write_s = write(folder / str(comms.leaders.rank))
        except OSError as error:
            fault = f"{error.strerror}"
    comms.arrive("to have written files")
    if comms.leads and not fault:
        try:
            read_s = read(folder / str((comms.leaders.rank + 1) % comms.leaders.size))
        except OSError as error:
            fault = f"{error.strerror} in reading what another node wrote"
    comms.arrive("to have read files")
    return (comms.leaders.gather((size, write_s, read_s, fault)) or []) if comms.leads else []


def write(path: Path) -> tuple[int, float]:
    """Bytes and seconds, until they are on the disk. Raises OSError."""
    piece = os.urandom(1 << 16) * (PIECE_BYTES >> 16)
    start_s, size = time.perf_counter(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while size < PIECE_BYTES * MOST_PIECES and (not size or time.perf_counter() - start_s < BUDGET_S):
            size += os.write(descriptor, piece)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, time.perf_counter() - start_s


def read(path: Path) -> float:
    """Seconds. Raises OSError."""
    start_s = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # of what this node has in memory already
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = bytearray(PIECE_BYTES)
        while file.readinto(memory):
            pass
    return time.perf_counter() - start_s
