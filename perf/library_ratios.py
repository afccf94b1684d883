"""`auto` beside the MPI library's bare call, with the certainty of each ratio; gloo as a third column.

    python perf/library_ratios.py measure --json FILE [...]     on each rank; collective
    python perf/library_ratios.py table FILE...                 Markdown of all files; alone

A hand of its own: it times by nothing of `hpcllm perf`, which tuned what is judged here.

    round   0: fresh | library | fresh | auto | fresh | gloo       1: the other way round       2: as 0 ...
                     ^ a barrier, then each rank's own clock; the slowest rank counts

    ratio       median time of the library over the median of ours: above 1, ours is faster
    interval    95 % of 1,000 ratios of medians, of rounds drawn with replacement
    copy        beside an allreduce of shared arrays: all ranks at once copy as many bytes as it reads and writes, their
                halves to and fro. Not a bound: what a sum reads it writes back while a cache still has it
    a cell fails from 256 KiB up where the upper end of its interval is below 0.95, twice; below 256 KiB it fails where
    ours takes over 4 us more, as tried on one rank, whose calls no other rank delays

Whether glibc keeps memory between calls (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_) belongs to the environment, and is
written down with each cell, as is the share of the cores that other processes took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpcllm.collectives import (
    Group,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    group_of,
    reduce_scatter,
    shared_zeros,
)  # fmt: skip
from hpcllm.collectives.tuning import load_tuning
from hpcllm.collectives.window import free_shared
from hpcllm.mpi.buffers import as_buffer
from hpcllm.mpi.stuck_calls import watch_calls
from hpcllm.mpi.wait import Waits, job_waits
from hpcllm.perf.arguments import parse_sizes
from hpcllm.perf.records import size_text
from hpcllm.system.hardware.node import busy_s
from hpcllm.system.text import counted

OPERATIONS = ("allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast")
SIZES = "4K,64K,256K,1M,4M,16M,32M,64M"
FLOAT_BYTES = 4
JUDGED_FROM_BYTES = 256 << 10
LEAST_RATIO = 0.95
DRAWS = 1000
ALL_CORES = range(os.cpu_count() or 1)  # of the machine, whichever of them this process may run on
Call = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One operation at one size; what JSON holds."""

    operation: str
    size_bytes: int  # of x; of the whole result for an all-gather
    codec: str
    memory: str
    malloc: str  # "as found" or "kept": by the variables
    library: str
    ranks: int
    nodes: int
    link: str  # "" on one node, else as --link says it
    waits: str  # "block", or the limit in words
    tuned: bool
    chosen: str
    rounds: int
    library_s: float
    auto_s: float
    gloo_s: float | None
    copy_s: float | None
    ratio: float
    least: float
    most: float
    others_share: float  # of all cores, that processes other than the ranks took
    repeated: bool = False

    @property
    def fails(self) -> bool:
        return self.ranks > 1 and self.size_bytes >= JUDGED_FROM_BYTES and self.most < LEAST_RATIO


class Arrays:
    """Arrays of one operation at one size, and the calls on them. Collective, as is `free`."""

    def __init__(self, operation: str, size_bytes: int, group: Group, shared: bool) -> None:
        n = size_bytes // FLOAT_BYTES
        n -= n % group.size if operation in ("alltoall", "allgather") else 0
        self.operation, self.group, self.n, self.shared = operation, group, n, shared
        self.ends = [n * rank // group.size for rank in range(group.size + 1)]
        own = self.ends[group.rank + 1] - self.ends[group.rank]
        make = (lambda m: shared_zeros(m, group)) if shared else torch.zeros
        self.x = make(own if operation == "allgather" else n)
        self.in_place = operation in ("allreduce", "broadcast")
        self.out = self.x if self.in_place else make(own if operation == "reduce_scatter" else n)
        self.fresh = torch.randn(self.x.numel(), generator=torch.Generator().manual_seed(group.rank))

    def refresh(self) -> None:
        self.x.copy_(self.fresh)

    def free(self) -> None:
        for array in {id(array): array for array in (self.x, self.out)}.values() if self.shared else ():
            if array.numel():
                free_shared(array, self.group)

    def library(self) -> Call:
        """The library's bare blocking call."""
        comm, x, out = self.group.comm, [as_buffer(self.x), MPI.FLOAT], [as_buffer(self.out), MPI.FLOAT]
        counts = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        return {
            "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, x),
            "reduce_scatter": lambda: comm.Reduce_scatter(x, out, counts),
            "allgather": lambda: comm.Allgather(x, out),
            "alltoall": lambda: comm.Alltoall(x, out),
            "broadcast": lambda: comm.Bcast(x, 0),
        }[self.operation]

    def auto(self, codec: str) -> Call:
        group, x, out = self.group, self.x, self.out
        return {
            "allreduce": lambda: allreduce(x, group, codec),
            "reduce_scatter": lambda: reduce_scatter(x, group, codec, out=out),
            "allgather": lambda: allgather(x, group, codec, out=out),
            "alltoall": lambda: alltoall(x, group, codec, out=out),
            "broadcast": lambda: broadcast(x, group, 0, codec),
        }[self.operation]

    def copies(self) -> Call:
        """A copy of x's halves to and fro, which reads and writes what a rank does of a sum of arrays as long as x."""
        half = self.n // 2
        first, second = self.x[:half], self.x[half : 2 * half]

        def copies() -> None:
            second.copy_(first)
            first.copy_(second)

        return copies

    def gloo(self) -> Call:
        x, out = self.x, self.out
        return {
            "allreduce": lambda: dist.all_reduce(x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
            "allgather": lambda: dist.all_gather_into_tensor(out, x),
            "alltoall": lambda: dist.all_to_all_single(out, x),
            "broadcast": lambda: dist.broadcast(x, 0),
        }[self.operation]


def chosen(arrays: Arrays, codec: str) -> str:
    """The algorithm and codec that `auto` planned for the last call."""
    plans = [plan for key, plan in arrays.group.plans.items() if key[:3] == (arrays.operation, arrays.n, codec)]
    return f"{plans[-1].algorithm} {plans[-1].codec.name}" if plans else "?"


def timed(calls: Sequence[Call], arrays: Arrays, rounds: int, warmup: int) -> np.ndarray:
    """Seconds of the slowest rank, (rounds, calls). Collective."""
    comm = arrays.group.comm
    seconds = np.zeros((warmup + rounds, len(calls)))
    for turn in range(warmup + rounds):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for index in order:
            arrays.refresh()
            comm.Barrier()
            start_s = time.perf_counter()
            calls[index]()
            seconds[turn, index] = time.perf_counter() - start_s
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return seconds[warmup:]


def ratio_interval(theirs_s: np.ndarray, ours_s: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians, and both ends of its 95 % interval by the bootstrap over rounds."""
    drawn = np.random.default_rng(0).integers(0, len(ours_s), (DRAWS, len(ours_s)))
    ratios = np.median(theirs_s[drawn], axis=1) / np.median(ours_s[drawn], axis=1)
    least, most = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(theirs_s) / np.median(ours_s)), float(least), float(most)


def library_name() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def measure(arrays: Arrays, codec: str, options: argparse.Namespace) -> Cell:
    """A cell; one that fails is measured once more. Long calls are warm from the trial. Collective."""
    calls = {"library": arrays.library(), "auto": arrays.auto(codec)}
    if options.gloo:
        calls["gloo"] = arrays.gloo()
    if arrays.shared and arrays.operation == "allreduce":
        calls["copy"] = arrays.copies()
    once = timed([*calls.values()], arrays, 2, 1)
    round_s = max(1e-6, float(np.median(once, axis=0).sum()))
    rounds = int(min(1000, max(options.least_rounds, options.seconds / round_s)))
    cell = _measure_once(calls, arrays, codec, options, rounds, repeated=False)
    return _measure_once(calls, arrays, codec, options, rounds, repeated=True) if cell.fails else cell


def _measure_once(
    calls: dict[str, Call], arrays: Arrays, codec: str, options: argparse.Namespace, rounds: int, repeated: bool
) -> Cell:
    group = arrays.group
    start_s, busy, own = time.perf_counter(), busy_s(ALL_CORES), time.process_time()
    seconds = timed([*calls.values()], arrays, rounds, warmup=3 if rounds > options.least_rounds else 0)
    passed_s, busy = time.perf_counter() - start_s, busy_s(ALL_CORES) - busy
    own = group.comm.allreduce(time.process_time() - own)
    ratio, least, most = ratio_interval(seconds[:, 0], seconds[:, 1])
    medians = dict(zip(calls, map(float, np.median(seconds, axis=0)), strict=True))
    return Cell(
        arrays.operation, FLOAT_BYTES * arrays.n, codec, options.memory,
        "kept" if os.environ.get("MALLOC_MMAP_MAX_") == "0" else "as found",
        library_name(),
        group.size, group.nodes, options.link, "block" if options.stall_s is None else f"{options.stall_s:g} s",
        options.tuning is not None, chosen(arrays, codec), rounds, medians["library"], medians["auto"],
        medians.get("gloo"), medians.get("copy"), ratio, least, most,
        max(0.0, busy - own) / (passed_s * len(ALL_CORES)), repeated,
    )  # fmt: skip


def measure_all(options: argparse.Namespace) -> None:
    """Measure every cell and write those of this run to the file, whole, after each. Collective."""
    torch.set_num_threads(1)
    group = group_of(MPI.COMM_WORLD)
    if options.tuning is not None:
        group.use_tuning(load_tuning(options.tuning))
    if options.stall_s is not None:
        job_waits.limit_s = options.stall_s
        watch_calls(job_waits, group.rank, lambda message: print(message, flush=True))
        group.wire.waits = Waits(options.stall_s, foreground=True)
    if options.gloo:
        _open_gloo(group)
    cells: list[Cell] = []
    for operation in options.operations.split(","):
        for size_bytes in parse_sizes(options.sizes, FLOAT_BYTES):
            arrays = Arrays(operation, size_bytes, group, options.memory == "shared")
            for codec in options.codecs.split(","):
                cells.append(measure(arrays, codec, options))
                if group.rank == 0:
                    _say(cells[-1])
                    options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=0), encoding="utf-8")
            arrays.free()
    if options.gloo:
        group.comm.Barrier()
        MPI.Finalize()
        os._exit(0)  # gloo's own end hangs now and then, where one rank is gone before the other


def _open_gloo(group: Group) -> None:
    """Let gloo's ranks meet on the address of rank 0's host. Collective."""
    with socket.socket() as free_port:
        free_port.bind(("", 0))
        host = socket.gethostbyname(socket.gethostname()) if group.nodes > 1 else "127.0.0.1"
        place = host, free_port.getsockname()[1]
    address, port = group.comm.bcast(place)
    warnings.simplefilter("ignore", FutureWarning)  # names that newer versions of PyTorch call otherwise
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=group.rank, world_size=group.size)


def _say(cell: Cell) -> None:
    gloo = "" if cell.gloo_s is None else f", gloo {cell.gloo_s * 1e6:.0f}"
    print(
        f"{cell.operation:14} {size_text(cell.size_bytes):>5} {cell.codec:9} {cell.ratio:5.2f} "
        f"[{cell.least:.2f}, {cell.most:.2f}]  us: library {cell.library_s * 1e6:.1f}, ours {cell.auto_s * 1e6:.1f}"
        f"{gloo}  {cell.chosen}, others {100 * cell.others_share:.0f} %{'  FAILS' if cell.fails else ''}",
        flush=True,
    )


def cells_of(files: Sequence[Path]) -> list[Cell]:
    """The cells of all files."""
    rows: list[dict[str, Any]] = [row for path in files for row in json.loads(path.read_text(encoding="utf-8"))]
    return [Cell(**row) for row in rows]


def table(files: Sequence[Path]) -> Iterator[str]:
    """Lines of Markdown: a table for each place and codec, a row for each operation, a column for each size."""
    cells = cells_of(files)
    for title in dict.fromkeys(map(_title, cells)):
        run = [cell for cell in cells if _title(cell) == title]
        sizes = sorted({_column(cell) for cell in run})
        yield from (f"### {title}", "", f"| | {' | '.join(map(size_text, sizes))} |", f"|---|{'---:|' * len(sizes)}")
        for row in dict.fromkeys((cell.operation, cell.malloc) for cell in run):
            found = {_column(cell): cell for cell in run if (cell.operation, cell.malloc) == row}
            shown = [_shown(found[size]) if size in found else "" for size in sizes]
            yield f"| {row[0]}, malloc {row[1]} | {' | '.join(shown)} |"
        percents = [100 * cell.others_share for cell in run]
        yield f"\nOther processes took {np.median(percents):.0f} % of the cores, at most {max(percents):.0f} %.\n"
    judged = [cell for cell in cells if cell.ranks > 1 and cell.size_bytes >= JUDGED_FROM_BYTES]
    yield f"{len(judged)} cells from 256 KiB up; {sum(cell.fails for cell in judged)} fail."


def _column(cell: Cell) -> int:
    """The size in bytes that was asked for, a power of two; an array is cut to a multiple of the ranks."""
    return 1 << (cell.size_bytes - 1).bit_length()


def _title(cell: Cell) -> str:
    ranks, nodes = (counted(cell.ranks, "rank"), counted(cell.nodes, "node"))
    place = f"{ranks} on {nodes}{f', {cell.link}' * bool(cell.link)}"
    waits = "" if cell.waits == "block" else f", waits limited to {cell.waits}"
    tuned = ", tuned" if cell.tuned else ""
    return f"{cell.library}, {place}, {cell.codec}, {cell.memory} memory{waits}{tuned}"


def _shown(cell: Cell) -> str:
    """A ratio with its interval, bold where it fails; below 256 KiB the microseconds of ours above the library's."""
    if cell.ranks == 1 or (cell.size_bytes < JUDGED_FROM_BYTES and cell.nodes == 1):
        return f"{(cell.auto_s - cell.library_s) * 1e6:+.1f} us"
    mark = "**" if cell.fails else ""
    gloo = "" if cell.gloo_s is None else f", gloo {cell.library_s / cell.gloo_s:.2f}"
    copy = "" if cell.copy_s is None else f", copy {cell.auto_s / cell.copy_s:.2f}"
    return f"{mark}{cell.ratio:.2f}{mark} [{cell.least:.2f}, {cell.most:.2f}]{gloo}{copy}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    at = verbs.add_parser("measure")
    at.add_argument("--json", type=Path, required=True)
    at.add_argument("--operations", default=",".join(OPERATIONS))
    at.add_argument("--sizes", default=SIZES)
    at.add_argument("--codecs", default="raw")
    at.add_argument("--memory", choices=("private", "shared"), default="private")
    at.add_argument("--stall-s", type=float, help="limit of waits, as in training; default: calls may block")
    at.add_argument("--tuning", type=Path)
    at.add_argument("--link", default="", help="what the hosts' links carry, for the title")
    at.add_argument("--gloo", action="store_true")
    at.add_argument("--seconds", type=float, default=0.3, help="for each cell, about (default: 0.3)")
    at.add_argument("--least-rounds", type=int, default=15)
    verbs.add_parser("table").add_argument("files", type=Path, nargs="+")
    return parser


if __name__ == "__main__":
    given = arguments().parse_args()
    if given.verb == "measure":
        measure_all(given)
    else:
        print("\n".join(table(given.files)))
