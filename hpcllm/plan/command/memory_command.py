"""The command `memory`: what each rank of a run will hold. Pure: it starts no MPI, and answers on a login node.

RUN.toml --set ... --ranks N --> layout --> predict, once for each kind of rank --> a row for ranks that are alike
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcllm.axes import coordinates
from hpcllm.config import Config
from hpcllm.model.shapes import parameter_count
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.command.planned import planned
from hpcllm.plan.memory.of_run import RankMemory, predict
from hpcllm.printable import size_text
from hpcllm.ranks import name_ranks

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "checkpoint")
LOWERED_BY = {
    "parameters": "mesh.pp or mesh.tp; with mesh.pp = 1 optimizer.shard = 'all'",
    "gradients": "optimizer.shard = 'states+gradients', mesh.pp or mesh.tp",
    "optimizer": "optimizer.shard = 'states', mesh.pp or mesh.tp",
    "activations": "more pipeline.microbatches, pipeline.recompute, mesh.sequence_parallel with mesh.tp, and "
    "pipeline.loss_tokens where the vocabulary is large",
    "buffers": "a smaller communication.bucket_mib",
    "checkpoint": "checkpoint.asynchronous = false",
}


@dataclass(frozen=True)
class Row:
    """Ranks that hold the same."""

    stage: int
    ranks: list[int]
    memory: RankMemory

    @property
    def name(self) -> str:
        return f"stage {self.stage} ({name_ranks(self.ranks, 3)})"

    def share(self, part: str) -> float:
        size: int = getattr(self.memory, part)
        return size / self.memory.total


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Raises UserError."""
    config, schedule = planned(arguments.run, arguments.overrides, arguments.ranks)
    rows = list(_rows(config, schedule))
    print(json.dumps(_facts(config, rows)) if arguments.json else "\n".join(_lines(config, rows)))
    return 0


def _rows(config: Config, schedule: Schedule) -> Iterator[Row]:
    """Replicas are alike, and tp ranks but for a vocabulary that does not divide evenly."""
    mesh = config.mesh
    sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    places = [coordinates(rank, sizes, mesh.order) for rank in range(math.prod(sizes.values()))]
    for stage in range(mesh.pp):
        alike: dict[RankMemory, list[int]] = {}
        of_tp = [predict(config, schedule, stage, tp_rank) for tp_rank in range(mesh.tp)]
        for rank, place in enumerate(places):
            if place["pp"] == stage:
                alike.setdefault(of_tp[place["tp"]], []).append(rank)
        yield from (Row(stage, ranks, memory) for memory, ranks in alike.items())


def _facts(config: Config, rows: list[Row]) -> dict[str, Any]:
    """{"parameters", "mesh", "ranks": [{"stage", "ranks", <part>_bytes, "total_bytes"}], "largest", "binds"}"""
    largest = _largest(rows)
    return {
        "parameters": parameter_count(config.model),
        "mesh": {"dp": config.mesh.dp, "pp": config.mesh.pp, "tp": config.mesh.tp},
        "ranks": [
            {"stage": row.stage, "ranks": row.ranks, "total_bytes": row.memory.total}
            | {f"{part}_bytes": getattr(row.memory, part) for part in PARTS}
            for row in rows
        ],
        "largest": largest.ranks[0],
        "binds": _binds(largest),
    }


def _lines(config: Config, rows: list[Row]) -> list[str]:
    mesh, largest = config.mesh, _largest(rows)
    cells = [["", *PARTS, "total"], *_cells(rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    part = _binds(largest)
    everywhere = sum(row.memory.total * len(row.ranks) for row in rows)
    return [
        f"{parameter_count(config.model):,} parameters ({config.model.preset}) in {config.precision.compute}, "
        f"dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, shard {config.optimizer.shard!r}, recompute "
        f"{config.pipeline.recompute!r}; predicted for each rank:",
        "",
        *("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells),
        "",
        f"all {mesh.dp * mesh.pp * mesh.tp} ranks together: {size_text(everywhere)}",
        f"{name_ranks(largest.ranks, 3)} need{'s' if len(largest.ranks) == 1 else ''} most, "
        f"{size_text(largest.memory.total)}, of which {100 * largest.share(part):.0f} % are {part}; lowered by "
        f"{LOWERED_BY[part]}",
        "the interpreter and its libraries come on top, some hundred MB a rank",
    ]


def _cells(rows: list[Row]) -> Iterator[list[str]]:
    """A line for the ranks of a stage that are alike in the digits that are shown."""
    alike: dict[tuple[str, ...], Row] = {}
    for row in rows:
        shown = (str(row.stage), *(size_text(getattr(row.memory, part)) for part in (*PARTS, "total")))
        ranks = alike[shown].ranks if shown in alike else []
        alike[shown] = Row(row.stage, sorted([*ranks, *row.ranks]), row.memory)
    for shown, row in alike.items():
        yield [row.name, *shown[1:]]


def _largest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.memory.total)


def _binds(row: Row) -> str:
    """The part that is most of a rank's memory."""
    return max(PARTS, key=row.share)
