"""What the planner says of a network beside what was measured on it: network.toml -> network.md, network.json.

    python perf/plan/network.py

Rows from which a number of the planner comes say which; none comes from the others.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hpcllm.plan.layouts import Layout
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.time.network import VOLUME, Network

HERE = Path(__file__).resolve().parent
LARGE_BYTES = 4 << 20  # from here bandwidth decides, not latency


@dataclass(frozen=True)
class Outcome:
    """A measured time, and the planner's."""

    row: dict[str, Any]
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def facts(self) -> dict[str, Any]:
        numbers = {"measured_s": self.measured_s, "predicted_s": self.predicted_s, "error": self.error}
        return {**self.row, **{key: float(f"{value:.4g}") for key, value in numbers.items()}}


def outcome(row: dict[str, Any], machine: Machine) -> Outcome:
    shape = {axis: row.get(axis, 1) for axis in ("tp", "dp", "pp")}
    ranks = shape["dp"] if shape["dp"] > 1 else shape["tp"]
    size_bytes = row["bytes"] * (ranks if row["op"] == "allgather" else 1)
    moved = size_bytes if row["op"] == "message" else VOLUME[row["op"]] * size_bytes * (ranks - 1) / ranks
    measured_s = row["time_us"] / 1e6 if "time_us" in row else moved / row["bus_gb_s"] / 1e9
    if row.get("alone"):
        machine = replace(machine, device=replace(machine.device, per_node=1, per_package=1))
        machine = replace(machine, fabric=replace(machine.fabric, nics_per_node=1))
    network = Network(machine, Layout(**shape, trainer="hpcllm" if row.get("mpi") else "megatron"))
    return Outcome(row, measured_s, _predicted_s(network, row["op"], size_bytes))


def _predicted_s(network: Network, operation: str, size_bytes: float) -> float:
    if operation == "message":
        return network.message_s(size_bytes, 0, 1)
    over = network.data_s if network.layout.dp > 1 else network.tensor_s
    return over(operation, size_bytes)


def table(outcomes: list[Outcome]) -> str:
    lines = ["| what | ranks | bytes | measured | predicted | error | chose |", "|---|--:|--:|--:|--:|--:|---|"]
    for each in outcomes:
        row = each.row
        ranks = " ".join(f"{axis} {row[axis]}" for axis in ("tp", "dp", "pp") if axis in row)
        times = f"{1e6 * each.measured_s:.4g} us | {1e6 * each.predicted_s:.4g} us | {100 * each.error:+.0f} %"
        lines.append(f"| {row['what']} | {ranks} | {row['bytes']} | {times} | {row.get('chose', '')} |")
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> str:
    large = [each for each in outcomes if each.row["bytes"] >= LARGE_BYTES]
    small = [each for each in outcomes if each not in large and "chose" not in each.row]
    factors = [max(each.predicted_s / each.measured_s, each.measured_s / each.predicted_s) for each in small]
    worst = max(abs(each.error) for each in large)
    return (
        f"Large messages: {len(large)} rows, worst error {100 * worst:.0f} %. Small ones that chose nothing: "
        f"{len(small)} rows, within a factor of {max(factors):.2f}, median {median(factors):.2f}."
    )


def main() -> None:
    given = tomllib.loads((HERE / "network.toml").read_text(encoding="utf-8"))
    outcomes = [outcome(row, read_machine(given["machine"])) for row in given["rows"]]
    title = f"# The network of {given['machine']}: predicted and measured\n\nWritten by perf/plan/network.py.\n"
    text = f"{title}\n{summary(outcomes)}\n\n{table(outcomes)}\n"
    (HERE / "network.md").write_text(text, encoding="utf-8")
    facts = [each.facts() for each in outcomes]
    (HERE / "network.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
