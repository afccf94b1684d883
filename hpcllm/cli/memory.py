"""The command `memory`: print what each rank of a run will hold. Pure: starts no MPI, answers on a login node.

RUN.toml --set ... --ranks N --> layout --> predict, once for each kind of rank --> a row for ranks that are alike
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcllm.cli.options import add_ranks, add_run_file, read_run
from hpcllm.config.schema import Config
from hpcllm.model.shapes import parameter_count, trained_shapes
from hpcllm.mpi.mesh_axes import coordinates
from hpcllm.mpi.partition import chunk_range
from hpcllm.mpi.rank_names import name_ranks
from hpcllm.pipeline.schedules import Schedule
from hpcllm.plan.memory.predict import predict
from hpcllm.plan.memory.sizes import RankMemory
from hpcllm.plan.resolve import resolve
from hpcllm.system.output import add_output, show
from hpcllm.system.text import percent, size_text, table

NARROW = {  # 80 columns
    "parameters": "params",
    "gradients": "grads",
    "activations": "activ.",
    "checkpoint": "ckpt",
    "offloaded": "offload",
}
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "checkpoint", "offloaded")
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
    """Ranks that hold the same number of bytes."""

    stage: int
    ranks: list[int]
    memory: RankMemory

    def share(self, part: str) -> float:
        size: int = getattr(self.memory, part)
        return size / self.memory.total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Predict the memory of each rank of a run: parameters, gradients, optimizer, activations, buffers. Nothing is "
        "run, so it answers at once on a login node."
    )
    add_run_file(parser)
    add_ranks(parser)
    add_output(parser, "the answer as JSON, sizes in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Raises UserError."""
    resolved = resolve(read_run(arguments.run, arguments.overrides), arguments.ranks)
    config, rows = resolved.config, list(_rows(resolved.config, resolved.schedule))
    show(arguments, _facts(config, rows), _lines(config, rows, arguments.wide))
    return 0


def _rows(config: Config, schedule: Schedule) -> Iterator[Row]:
    """Yield a row for ranks that are alike: replicas, and tp ranks unless the vocabulary divides unevenly."""
    mesh = config.mesh
    sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    held: list[dict[int, list[int]]] = [{} for _ in range(mesh.pp)]  # of each stage: first tp rank alike -> ranks
    first_alike = _first_alike(config)
    for rank in range(math.prod(sizes.values())):
        place = coordinates(rank, sizes, mesh.order)
        held[place["pp"]].setdefault(first_alike[place["tp"]], []).append(rank)
    for stage, by_tp in enumerate(held):
        alike: dict[RankMemory, list[int]] = {}
        for tp_rank, ranks in by_tp.items():
            alike.setdefault(predict(config, schedule, stage, tp_rank), []).extend(ranks)
        yield from (Row(stage, sorted(ranks), memory) for memory, ranks in alike.items())


def _first_alike(config: Config) -> list[int]:
    """Return for each tp rank the first that holds as much: as many rows of the vocabulary; rank 0 writes more."""
    first: dict[tuple[bool, int], int] = {}
    rows = (chunk_range(config.model.vocabulary, config.mesh.tp, tp_rank) for tp_rank in range(config.mesh.tp))
    return [first.setdefault((tp_rank == 0, end - start), tp_rank) for tp_rank, (start, end) in enumerate(rows)]


def _facts(config: Config, rows: list[Row]) -> dict[str, Any]:
    """Return the answer as JSON has it.

    {"parameters", "trained_parameters", "mesh", "ranks": [{"stage", "ranks", <part>_bytes, "total_bytes"}], "largest",
    "binds"}
    """
    largest = _largest(rows)
    return {
        "parameters": parameter_count(config.model),
        "trained_parameters": _trained(config),
        "mesh": {"dp": config.mesh.dp, "pp": config.mesh.pp, "tp": config.mesh.tp},
        "ranks": [
            {"stage": row.stage, "ranks": row.ranks, "total_bytes": row.memory.total}
            | {f"{part}_bytes": getattr(row.memory, part) for part in PARTS}
            for row in rows
        ],
        "largest": largest.ranks[0],
        "binds": _binds(largest),
    }


def _lines(config: Config, rows: list[Row], wide: bool) -> list[str]:
    mesh, largest = config.mesh, _largest(rows)
    parts = [part for part in PARTS if part != "offloaded" or largest.memory.offloaded]
    titles = parts if wide else [NARROW.get(part, part) for part in parts]
    part = _binds(largest)
    everywhere = sum(row.memory.total * len(row.ranks) for row in rows)
    adapter = config.finetuning.adapter
    adapters = f", {_trained(config):,} of adapters on a base as {adapter.base}," if adapter.rank else ""
    return [
        f"{parameter_count(config.model):,} parameters ({config.model.preset}){adapters} in "
        f"{config.precision.compute}, dp={mesh.dp} pp={mesh.pp} tp={mesh.tp}, shard {config.optimizer.shard!r}, "
        f"recompute {config.pipeline.recompute!r}; predicted for each rank:",
        "",
        *table(["", *titles, "total"], list(_cells(rows, parts)), indent="", gap="  "),
        "",
        f"all {mesh.dp * mesh.pp * mesh.tp} ranks together: {size_text(everywhere)}",
        f"{name_ranks(largest.ranks, 3)} need{'s' if len(largest.ranks) == 1 else ''} most, "
        f"{size_text(largest.memory.total)}, of which {percent(largest.share(part), 0)} are {part}; lowered by "
        f"{LOWERED_BY[part]}",
        "the interpreter and its libraries come on top, some hundred MB a rank",
    ]


def _trained(config: Config) -> int:
    """Return the number of values that a run updates."""
    return sum(math.prod(shape) for shape in trained_shapes(config.model, config.finetuning.adapter).values())


def _cells(rows: list[Row], parts: list[str]) -> Iterator[list[str]]:
    """Yield a line for the ranks of a stage that are alike in the digits that are shown."""
    alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for row in rows:
        shown = tuple(size_text(getattr(row.memory, part)) for part in (*parts, "total"))
        alike.setdefault((row.stage, shown), []).extend(row.ranks)
    for (stage, shown), ranks in alike.items():
        yield [f"stage {stage} ({name_ranks(sorted(ranks), 3)})", *shown]


def _largest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.memory.total)


def _binds(row: Row) -> str:
    """Return the part that is most of a rank's memory; what was sent away to the host's is not to be lowered."""
    return max(PARTS[: PARTS.index("offloaded")], key=row.share)
