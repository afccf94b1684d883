"""`tune`: measure an allocation, write tuning.toml, and show what `auto` then chooses and whether it was right.

    measure links, codecs, library   -->   tuning.toml   -->   for each operation and size: the choice by formula,
                                                               beside every algorithm timed, in turns

Sizes are bytes of the whole array, as the choice depends on them: of x, or of `out` for an all-gather.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcllm.codecs.names import examples, parse_name
from hpcllm.collectives.choice import candidates, choose
from hpcllm.collectives.cost import COSTS
from hpcllm.collectives.tuning import Tuning, to_text
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.perf.arguments import parse_sizes
from hpcllm.perf.records import write_whole

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcllm.collectives.group import Group
    from hpcllm.perf.timing import Case

ASKED = "int8:256,exp"
SIZES = "4K,64K,1M,16M"
CLOSE = 1.1  # a choice within 10 % of the best is a good one
TIME_S = 0.5  # for all iterations of one algorithm
COLUMNS = ("operation", "bytes", "asked", "chosen", "predicted", "measured", "native", "best", "why")


@dataclass(frozen=True)
class Row:
    """One choice. Times are medians of the slowest rank; native_s is the MPI library's own, without a codec."""

    operation: str
    bytes: int
    asked: str
    algorithm: str
    codec: str
    why: str
    predicted_s: float
    measured_s: float
    native_s: float
    best: str
    best_s: float

    @property
    def good(self) -> bool:
        return self.measured_s <= CLOSE * self.best_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure links, codecs and the MPI library (a few seconds), write them to a file that [communication] tuning "
        "and --tuning read, then time what would be chosen beside all else."
    )
    parser.add_argument("--output", type=Path, default=Path("tuning.toml"), metavar="FILE", help="default: tuning.toml")
    parser.add_argument(
        "--codecs", default=ASKED, metavar="LIST", help=f"asked for in the table, beside raw (default: {ASKED})"
    )
    parser.add_argument(
        "--sizes", default=SIZES, metavar="A:B", help=f"of whole arrays, 1K:256M or a list (default: {SIZES})"
    )
    parser.add_argument("--operations", default=",".join(COSTS), metavar="LIST", help="default: all five")
    parser.add_argument("--rates-only", action="store_true", help="write the file and time no collectives")
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and nothing else")


def run(arguments: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Collective over comm. Returns the exit code. Raises ConfigError before any work."""
    from hpcllm.collectives.group import group_of
    from hpcllm.collectives.measure import CODECS, measure
    from hpcllm.together import on_root

    asked, sizes, operations = _asked(arguments.codecs), parse_sizes(arguments.sizes, 4), _operations(arguments)
    on_root(comm, lambda: _check_writable(arguments.output))
    group = group_of(comm)
    tuning = Tuning(measure(group, [*CODECS, *asked]), _facts(group))
    on_root(comm, lambda: _write(arguments.output, to_text(tuning)))
    say: Callable[[str], None] = (
        (lambda _: None) if arguments.json or comm.rank else lambda text: print(text, flush=True)
    )
    say(f"wrote {arguments.output}: {_summary(tuning)}")
    rows: list[Row] = []
    if not arguments.rates_only:
        say(_line(COLUMNS))
        for row in _rows(operations, sizes, asked, tuning, group):
            rows.append(row)
            say(_line(_cells(row)))
        say(_verdict(rows))
    if arguments.json and comm.rank == 0:
        print(json.dumps({"tuning": str(arguments.output), "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


def _rows(operations: list[str], sizes: list[int], asked: list[str], tuning: Tuning, group: Group) -> Iterator[Row]:
    """The choices of each operation and size, after timing all that could have been chosen. Collective over group."""
    for operation in operations:
        for size_bytes in sizes:
            times = _times(operation, size_bytes, asked, group)
            yield from (_row(operation, size_bytes, codec, times, tuning, group) for codec in asked)


def _row(
    operation: str, size_bytes: int, asked: str, times: dict[tuple[str, str], float], tuning: Tuning, group: Group
) -> Row:
    from hpcllm.collectives.select import shape_of
    from hpcllm.together import on_root

    choice = on_root(group.comm, lambda: choose(operation, size_bytes, asked, "float32", shape_of(group), tuning.rates))
    assert choice is not None  # every codec that can be asked for was measured
    allowed = {key: seconds for key, seconds in times.items() if key[1] in ("raw", asked)}
    best = min(allowed, key=allowed.__getitem__)
    return Row(
        operation,
        size_bytes,
        asked,
        **asdict(choice),
        measured_s=times[choice.algorithm, choice.codec],
        native_s=times["native", "raw"],
        best=" ".join(best),
        best_s=allowed[best],
    )


def _times(operation: str, size_bytes: int, asked: list[str], group: Group) -> dict[tuple[str, str], float]:
    """Median seconds of every (algorithm, codec) that may be chosen, taken in turns. Collective over group."""
    from hpcllm.collectives.select import shape_of
    from hpcllm.perf.timing import in_turns

    shape = shape_of(group)
    keys = [(name, codec) for codec in asked for name in candidates(operation, codec, "float32", shape)]
    cases = [_case(operation, size_bytes // 4, name, codec, group) for name, codec in keys]
    trial = in_turns(group.comm, cases, 1, 1, lambda: False)
    rounds = max(3, min(50, round(TIME_S / max(seconds.median for seconds in trial))))
    timed = in_turns(group.comm, cases, rounds, 0, lambda: False)
    return {key: seconds.median for key, seconds in zip(keys, timed, strict=True)}


def _case(operation: str, n: int, algorithm: str, codec: str, group: Group) -> Case:
    """One collective over gradient-like values of n float32 in all."""
    import torch

    from hpcllm.collectives import operations
    from hpcllm.perf.timing import Case
    from hpcllm.perf.values import pattern, unroll

    n -= n % group.size  # blocks of an all-to-all are equally long
    source = torch.empty(n)
    unroll(pattern(group.rank, torch.float32), 0, source)
    x, own, out = source.clone(), torch.empty(n // group.size), torch.empty(n)
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: operations.allreduce(x, group, codec, algorithm),
        "reduce_scatter": lambda: operations.reduce_scatter(x, group, codec, algorithm, out=own),
        "allgather": lambda: operations.allgather(x[: n // group.size], group, codec, algorithm, out=out),
        "alltoall": lambda: operations.alltoall(x, group, codec, algorithm, out=out),
        "broadcast": lambda: operations.broadcast(x, group, 0, codec, algorithm),
    }
    return Case(prepare=lambda: _fill(x, source), run=lambda: _run(calls[operation]))


def _fill(x: object, source: object) -> None:
    x.copy_(source)  # type: ignore[attr-defined]


def _run(call: Callable[[], object]) -> None:
    call()


def _facts(group: Group) -> dict[str, str | int]:
    from hpcllm.perf.machine import library_name

    return {
        "machine": platform.node(),
        "library": library_name(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ranks": group.size,
        "nodes": group.nodes,
    }


def _summary(tuning: Tuning) -> str:
    rates, facts = tuning.rates, tuning.facts
    far = f", between nodes {rates.far.bandwidth_gb_s:.3g} GB/s a node" if int(facts["nodes"]) > 1 else ""
    return (
        f"{facts['ranks']} ranks, {facts['nodes']} nodes, {facts['library']}; inside a node "
        f"{rates.near.bandwidth_gb_s:.3g} GB/s a rank, {1e6 * rates.near.latency_s:.1f} us{far}"
    )


def _line(cells: tuple[str, ...]) -> str:
    widths = (15, 10, 9, 28, 10, 10, 10, 28, 0)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    times = (_seconds(value) for value in (row.predicted_s, row.measured_s, row.native_s))
    chosen = f"{row.algorithm} {row.codec}"
    return (row.operation, str(row.bytes), row.asked, chosen, *times, f"{row.best} {_seconds(row.best_s)}", row.why)


def _seconds(value: float) -> str:
    return f"{1e6 * value:.1f} us" if value < 1e-3 else f"{1e3 * value:.2f} ms"


def _verdict(rows: list[Row]) -> str:
    good = sum(row.good for row in rows)
    return f"{good} of {len(rows)} choices within 10 % of the best measured"


def _asked(text: str) -> list[str]:
    """raw and the codecs in the list, each once. Raises ConfigError."""
    try:
        return list(dict.fromkeys(["raw", *(str(parse_name(name.strip())) for name in text.split(","))]))
    except ValueError as error:
        raise ConfigError(f"--codecs: {error} (one of each kind: {', '.join(examples())})") from error


def _operations(arguments: argparse.Namespace) -> list[str]:
    """Raises ConfigError."""
    names = [name.strip() for name in arguments.operations.split(",")]
    for name in names:
        if name not in COSTS:
            raise ConfigError(f"--operations {name!r} is unknown; valid: {', '.join(COSTS)}")
    return names


def _check_writable(path: Path) -> None:
    """Raises ConfigError: before the work, not after it."""
    if path.is_dir() or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"--output {str(path)!r} cannot be written; valid: a file in a folder that is writable")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise HpcllmError(f"cannot write {path}: {error.strerror}") from error
