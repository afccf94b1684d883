"""The command `layout`: print which rank is which, what of a step's traffic crosses nodes, and a better order.

RUN.toml --ranks --ranks-per-node --> traffic, slots --> as it is | the best found --> table, --json, --reorder FILE
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcllm.cli.options import add_ranks, add_run_file, count, read_run
from hpcllm.config import machines
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError
from hpcllm.mpi.mesh_axes import AXES, coordinates
from hpcllm.mpi.rank_names import name_ranks
from hpcllm.plan.rank_order.slots import (
    Candidate,
    Slots,
    Triple,
    best_order,
    given_order,
    homes,
    rank_list,
    srun_distribution,
    write_rank_order_file,
)
from hpcllm.plan.rank_order.traffic import Traffic, step_traffic
from hpcllm.plan.resolve import resolve
from hpcllm.system.output import add_output, show
from hpcllm.system.text import percent, size_text, table

MOST_NODES_SHOWN = 8
MOST_RANKS_SHOWN = 16  # one by one, of a node


@dataclass(frozen=True)
class Answer:
    """Given and best order of the ranks of a run, and the traffic that both send."""

    config: Config
    traffic: Traffic
    slots: Slots
    given: Candidate
    best: Candidate
    option: str  # value of srun --distribution that does as well as the best; empty: none
    ranks: list[int]  # rank in each slot, in the best order

    @property
    def shape(self) -> Triple:
        mesh = self.config.mesh
        return mesh.dp, mesh.pp, mesh.tp

    def crossing(self, found: Candidate) -> tuple[dict[str, float], dict[str, float]]:
        """Return kind -> bytes between nodes, and kind -> bytes between packages of one node."""
        where = (homes(found.places, each, self.shape) for each in (self.slots.nodes, self.slots.packages))
        nodes, packages = map(self.traffic.crossing, where)
        return nodes, {kind: packages[kind] - nodes[kind] for kind in nodes}

    @property
    def everything(self) -> dict[str, float]:
        """Kind of traffic -> bytes that travel between ranks at all."""
        return self.traffic.crossing(np.arange(self.slots.ranks).reshape(self.shape))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Show which rank of a run holds what on which node, count the bytes of a step that cross nodes, and look for "
        "an order of the ranks with fewer. Nothing is run, so it answers at once on a login node."
    )
    add_run_file(parser)
    add_ranks(parser)
    parser.add_argument("--ranks-per-node", type=count, metavar="K", help="default: the devices of run.machine's nodes")
    parser.add_argument("--ranks-per-package", type=count, metavar="P", help="default: of run.machine, or 1")
    words, usual = "write the better order as Cray MPICH reads it (default: MPICH_RANK_ORDER)", "MPICH_RANK_ORDER"
    parser.add_argument("--reorder", nargs="?", const=usual, type=Path, metavar="FILE", help=words)
    add_output(parser, "the answer as JSON, sizes in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer, and write the rank order file if requested. Raises UserError."""
    resolved = resolve(read_run(arguments.run, arguments.overrides), arguments.ranks)
    config, mesh = resolved.config, resolved.config.mesh
    shape, slots = (mesh.dp, mesh.pp, mesh.tp), _slots(arguments, config, resolved.ranks)
    traffic = step_traffic(config, resolved.schedule.placement)
    given, best = (find(traffic, slots, shape, mesh.order) for find in (given_order, best_order))
    option = srun_distribution(traffic, slots, shape, mesh.order, best.cost)
    answer = Answer(config, traffic, slots, given, best, option, rank_list(best.places, shape, mesh.order))
    if arguments.reorder:
        shares = f"{_share(answer, best)}; as it is: {_share(answer, given)}"
        about = [f"hpcllm layout: {_headline(answer)}", shares]
        write_rank_order_file(arguments.reorder, answer.ranks, slots.per_node, about)
    show(arguments, _facts(answer), _lines(answer, arguments.reorder))
    return 0


def _slots(arguments: argparse.Namespace, config: Config, ranks: int) -> Slots:
    """Return the slots that the options say, else those of run.machine. Raises ConfigError."""
    device = machines.load(config.run.machine).get("device", {}) if config.run.machine else {}
    per_node, per_package = arguments.ranks_per_node, arguments.ranks_per_package
    per_node = device.get("per_node") if per_node is None else per_node
    per_package = device.get("per_package", 1) if per_package is None else per_package
    if per_node is None:
        raise ConfigError("how many ranks are on a node? Give --ranks-per-node, or a run.machine with devices")
    if per_node < 1 or per_package < 1 or per_node % per_package:
        raise ConfigError(
            f"{per_node} ranks a node in packages of {per_package} cannot be; valid: --ranks-per-package divides "
            "--ranks-per-node, both >= 1"
        )
    return Slots(ranks, per_node, per_package)


def _facts(answer: Answer) -> dict[str, Any]:
    """Return {"ranks", "mesh", "order", "ranks_per_node", "traffic": {kind: {...}}, "given", "best": {...}}."""
    (nodes, packages), (best_nodes, best_packages) = answer.crossing(answer.given), answer.crossing(answer.best)

    def between(nodes: float, packages: float) -> dict[str, float]:
        return {"between_nodes_bytes": nodes, "between_packages_bytes": packages}

    return {
        "ranks": answer.slots.ranks,
        "mesh": dict(zip(AXES, answer.shape, strict=True)),
        "order": answer.config.mesh.order,
        "ranks_per_node": answer.slots.per_node,
        "ranks_per_package": answer.slots.per_package,
        "traffic": {
            kind: {"bytes": size} | between(nodes[kind], packages[kind]) for kind, size in answer.everything.items()
        },
        "given": between(sum(nodes.values()), sum(packages.values())),
        "best": between(sum(best_nodes.values()), sum(best_packages.values()))
        | {"order": answer.best.order or None, "distribution": answer.option or None, "rank_order": answer.ranks},
    }


def _lines(answer: Answer, written: Path | None) -> list[str]:
    lines = [_headline(answer), "", *_drawing(answer), "", *_table(answer), ""]
    lines += _wide_tp(answer)
    if not answer.best.cost < answer.given.cost:
        lines.append(f"no better order was found than {answer.config.mesh.order!r}: {_share(answer, answer.given)}")
    else:
        lines += [f"as it is:       {_share(answer, answer.given)}", f"a better order: {_share(answer, answer.best)}"]
        lines += _ways(answer, written)
    if written:
        lines.append(f"written: {written}; for Cray MPICH, with Slurm's block distribution:")
        lines.append(f"  export MPICH_RANK_REORDER_METHOD=3 MPICH_RANK_REORDER_FILE={shlex.quote(str(written))}")
    return lines


def _headline(answer: Answer) -> str:
    mesh, slots = answer.config.mesh, answer.slots
    count = int(slots.nodes[-1]) + 1
    packages = f" in packages of {slots.per_package}" if slots.per_package > 1 else ""
    return (
        f"{slots.ranks} ranks, dp={mesh.dp} pp={mesh.pp} tp={mesh.tp} in order {mesh.order}, on {count} "
        f"node{'s' if count > 1 else ''} of {slots.per_node}{packages}"
    )


def _drawing(answer: Answer) -> list[str]:
    """Draw a line a node: its ranks, | between packages, and what they hold."""
    sizes = dict(zip(AXES, answer.shape, strict=True))
    slots, rows = answer.slots, []
    for node, start in enumerate(range(0, slots.ranks, slots.per_node)[:MOST_NODES_SHOWN]):
        ranks = range(start, min(start + slots.per_node, slots.ranks))
        places = [coordinates(rank, sizes, answer.config.mesh.order) for rank in ranks]
        holds = [name_ranks(place[axis] for place in places).split(" ", 1)[1] for axis in AXES]  # '0-3'
        rows.append([f"node {node}", _ranks(ranks, slots.per_package), *holds])
    more = int(slots.nodes[-1]) + 1 - len(rows)
    return table(["", "ranks", "dp", "stage", "tp"], rows, indent="") + ([f"and {more} more nodes"] if more else [])


def _ranks(ranks: range, per_package: int) -> str:
    if len(ranks) > MOST_RANKS_SHOWN:
        return name_ranks(ranks)
    packages = [ranks[start : start + per_package] for start in range(0, len(ranks), per_package)]
    return (" | " if per_package > 1 else " ").join(" ".join(map(str, package)) for package in packages)


def _table(answer: Answer) -> list[str]:
    """Write the bytes a step of each kind of traffic that there is."""
    everything, nodes, packages = answer.everything, *answer.crossing(answer.given)
    columns = {"bytes": everything, "between nodes": nodes}
    if answer.slots.per_package > 1:
        columns["between packages"] = packages
    rows = [[kind, *(size_text(of[kind]) for of in columns.values())] for kind, size in everything.items() if size]
    rows.append(["all", *(size_text(sum(of.values())) for of in columns.values())])
    return table(["a step of all ranks", *columns], rows, indent="")


def _share(answer: Answer, found: Candidate) -> str:
    """Write '14.8 GB between nodes (12.2 %), 35.9 GB between packages'"""
    everything = sum(answer.everything.values())
    share = f" ({percent(found.cost.nodes / everything)})" if everything else ""
    inside = f", {size_text(found.cost.packages - found.cost.nodes)} between packages"
    return f"{size_text(found.cost.nodes)} between nodes{share}" + (inside if answer.slots.per_package > 1 else "")


def _wide_tp(answer: Answer) -> list[str]:
    """Warn of a tensor-parallel group that no node can hold: no order of ranks helps."""
    tp, per_node = answer.config.mesh.tp, answer.slots.per_node
    if tp <= per_node:
        return []
    size = size_text(answer.crossing(answer.best)[0]["tensor"])
    return [
        f"mesh.tp = {tp} is more than the {per_node} ranks of a node: layers wait for {size} between nodes in "
        f"every step, in any order; mesh.tp <= {per_node} keeps that inside nodes"
    ]


def _ways(answer: Answer, written: Path | None) -> list[str]:
    ways = []
    if answer.best.order:
        ways.append(f"  --set mesh.order={answer.best.order}")
    if answer.option:
        ways.append(f"  srun --ntasks-per-node={answer.slots.per_node} --distribution={answer.option}")
    if not written:
        ways.append("  a rank order file for Cray MPICH: --reorder")
    return ways
