"""`tune`: measure an allocation, write tuning.toml, and show what `auto` then chooses and whether it was right.

    codecs: --codecs, those of a run file, or the usual ones
        |
    measure links, codecs, library   -->   tuning.toml   -->   for each operation and size: the choice by formula,
                                                               beside every algorithm timed, in turns

Sizes are bytes of the whole array, as the choice depends on them: of x, or of `out` for an all-gather.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from mpi4py import MPI

from hpcllm.codecs import find_codec
from hpcllm.collectives import measure as measuring
from hpcllm.collectives.group import Group, group_of
from hpcllm.collectives.selection import candidates, choose
from hpcllm.collectives.tuning import Tuning, to_text
from hpcllm.config import schema as configs
from hpcllm.config.policies import FEEDBACK
from hpcllm.config.schema import DTYPES, traffic_codecs
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.perf.arguments import TUNE_CODECS, codec_names
from hpcllm.perf.arrays import Arrays
from hpcllm.perf.session import library_name
from hpcllm.perf.timing import in_turns
from hpcllm.system.output import check_writable, is_json_alone, say, write_json, write_whole
from hpcllm.system.text import aligned, counted

CLOSE = 1.1  # a choice within 10 % of the best is a good one
TIME_S = 0.5  # for all iterations of one algorithm
COLUMNS = ("operation", "bytes", "asked", "chosen", "predicted", "measured", "native", "best", "why")
WIDTHS = (-15, -10, -9, -28, -10, -10, -10, -28, -1)  # all aligned to the left
NARROW = (0, 1, 2, 3, 5)  # columns that fit in 80: without the prediction, the peers and the reason


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


def run(arguments: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Measure, write, print; returns the exit code. Collective over comm. Raises ConfigError before any work."""
    on_root(comm, lambda: _check_output(arguments))
    asked, dtypes = on_root(comm, lambda: _asked(arguments))
    codecs = list(dict.fromkeys(["raw", *asked]))
    group = group_of(comm)
    tuning = Tuning(measuring.measure(group, [*measuring.CODECS, *codecs], dtypes), _facts(group))
    on_root(comm, lambda: _write(arguments, to_text(tuning)))
    silent = comm.rank > 0 or is_json_alone(arguments)
    tell: Callable[[str], None] = (lambda _: None) if silent else lambda text: say([text], arguments.wide)
    tell(f"wrote {arguments.output}: {_summary(tuning)}")
    rows: list[Row] = []
    if not arguments.rates_only:
        shown = range(len(COLUMNS)) if arguments.wide else NARROW
        widths = [WIDTHS[place] for place in shown]
        tell(aligned([COLUMNS[place] for place in shown], widths, " "))
        for row in _rows(arguments, codecs, tuning, group):
            rows.append(row)
            cells = _cells(row)
            tell(aligned([cells[place] for place in shown], widths, " "))
        good = sum(row.good for row in rows)
        tell(f"{good} of {len(rows)} choices within 10 % of the best measured")
    facts = {"tuning": str(arguments.output), "rows": [asdict(row) for row in rows]}
    if arguments.json:
        on_root(comm, lambda: write_json(arguments, facts))
    return 0


def _asked(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Codecs to show in the table, beside raw, and the types to measure all codecs in. Raises ConfigError."""
    if arguments.run is None:
        return list(arguments.codecs or codec_names(TUNE_CODECS)), list(measuring.DTYPES)
    config = configs.load(arguments.run, arguments.overrides)
    of_run = [name.removesuffix(FEEDBACK) for name in traffic_codecs(config.communication).values()]
    shown = [*(arguments.codecs or ()), *codec_names(",".join(of_run))]
    return shown, list(dict.fromkeys([*measuring.DTYPES, DTYPES[config.precision.compute]]))


def _rows(arguments: argparse.Namespace, codecs: Sequence[str], tuning: Tuning, group: Group) -> Iterator[Row]:
    """The choices of each operation and size, after timing all that could have been chosen. Collective over group."""
    for operation in arguments.operations:
        for size_bytes in arguments.sizes:
            times = _times(operation, size_bytes, codecs, group)
            yield from (_row(operation, size_bytes, codec, times, tuning, group) for codec in codecs)


def _row(
    operation: str, size_bytes: int, asked: str, times: dict[tuple[str, str], float], tuning: Tuning, group: Group
) -> Row:
    choice = on_root(group.comm, lambda: choose(operation, size_bytes, asked, "float32", group.shape, tuning.rates))
    assert choice is not None  # every codec of the list was measured
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


def _times(operation: str, size_bytes: int, codecs: Sequence[str], group: Group) -> dict[tuple[str, str], float]:
    """Median seconds of every (algorithm, codec) that may be chosen, taken in turns. Collective over group."""
    keys = [(name, codec) for codec in codecs for name in candidates(operation, codec, "float32", group.shape)]
    part = size_bytes // 4 // group.size  # values: blocks of an all-to-all are equally long
    size = part if operation in ("allgather", "alltoall") else part * group.size
    arrays = [Arrays(operation, size, torch.float32, group) for _ in keys]
    cases = [one.case(name, find_codec(codec, torch.float32)) for one, (name, codec) in zip(arrays, keys, strict=True)]
    trial = in_turns(group.comm, cases, 1, 1, lambda: False)
    rounds = max(3, min(50, round(TIME_S / max(seconds.median for seconds in trial))))
    timed = in_turns(group.comm, cases, rounds, 0, lambda: False)
    return {key: seconds.median for key, seconds in zip(keys, timed, strict=True)}


def _facts(group: Group) -> dict[str, str | int]:
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
    where = f"{counted(int(facts['ranks']), 'rank')} on {counted(int(facts['nodes']), 'node')}"
    return (
        f"{where}, {facts['library']}; inside a node "
        f"{rates.near.bandwidth_gb_s:.3g} GB/s a rank, {1e6 * rates.near.latency_s:.1f} us{far}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    times = (_seconds(value) for value in (row.predicted_s, row.measured_s, row.native_s))
    chosen = f"{row.algorithm} {row.codec}"
    return (row.operation, str(row.bytes), row.asked, chosen, *times, f"{row.best} {_seconds(row.best_s)}", row.why)


def _seconds(value: float) -> str:
    return f"{1e6 * value:.1f} us" if value < 1e-3 else f"{1e3 * value:.2f} ms"


def _check_output(arguments: argparse.Namespace) -> None:
    try:
        check_writable(arguments.output)
    except ConfigError as error:
        raise ConfigError(f"--output {str(arguments.output)!r} cannot be written: {error}") from error


def _write(arguments: argparse.Namespace, text: str) -> None:
    try:
        write_whole(arguments.output, text)
    except OSError as error:
        raise HpcllmError(f"cannot write {arguments.output}: {error.strerror}") from error
