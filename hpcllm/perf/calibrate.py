"""`step --calibrate`: what the planner needs to know of this allocation, measured in about half a minute.

    kernels   one by one, on every rank at once       kernels.py      rates of products, seconds of all others by size
    links     inside a node, between nodes            collectives/measure.py, as `tune`
    sums      of arrays that lie in a node's shared memory, as the trainer's gradients do

    mpirun -n 2 python -m hpcllm.perf step --calibrate --json results.json
    python -m hpcllm plan --calibrate results.json --output my-machine.toml

As many ranks on a node as will train there: they share its memory, its caches and its power.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
import tomllib
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from hpcllm.collectives import chunk_range, group_of, shared_zeros
from hpcllm.collectives.group import Group
from hpcllm.collectives.measure import measure
from hpcllm.collectives.tuning import Tuning, to_text
from hpcllm.errors import ConfigError
from hpcllm.mpi.collective_errors import on_root
from hpcllm.perf.arrays import collective_call
from hpcllm.perf.kernels import CPU, DEVICE, Bench, Extent, measured_kernels
from hpcllm.perf.session import library_name
from hpcllm.plan.time.kernel_times import PRECISIONS
from hpcllm.system import device as devices
from hpcllm.system.device import torch_dtype
from hpcllm.system.hardware.node import find_memory
from hpcllm.system.output import STANDARD_OUTPUT, say, write_whole
from hpcllm.system.text import counted

SUM_VALUES = (1 << 8, 1 << 14, 1 << 18, 1 << 22)  # of arrays in shared memory: a norm's up to a bucket's
SETS = 4  # of the largest: more than caches hold


def run(arguments: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Measure and write. Collective over comm. Raises ConfigError."""
    if arguments.json in (None, STANDARD_OUTPUT):
        raise ConfigError("--calibrate needs --json FILE: where what was measured goes, for `plan --calibrate FILE`")
    group = group_of(comm)
    device = devices.choose_device("auto", devices.local_rank(group.node.rank))
    precisions = _precisions(arguments.precisions, device)
    results = calibrate(group, device, precisions, CPU if device.type == "cpu" else DEVICE)
    on_root(comm, lambda: write_whole(arguments.json, json.dumps(results) + "\n"))
    if comm.rank == 0:
        say([f"wrote {arguments.json}: {_summary(results)}"], arguments.wide)
    return 0


def calibrate(group: Group, device: torch.device, precisions: list[str], extent: Extent) -> dict[str, Any]:
    """Contents of a results file. Collective over group."""
    facts = _facts(group, device)
    kernels = {}
    for precision in precisions:
        kernels[precision] = measured_kernels(Bench(group.comm, device, torch_dtype(precision), extent))
    if group.size > 1 and group.nodes == 1 and device.type == "cpu" and "fp32" in kernels:
        kernels["fp32"]["curves"] |= _shared_sums(Bench(group.comm, device, torch.float32, extent), group)
    tuning = Tuning(measure(group), {key: facts[key] for key in ("machine", "library", "date", "ranks", "nodes")})
    return {"measured": facts, "kernels": kernels, "tuning": tomllib.loads(to_text(tuning))}


def _facts(group: Group, device: torch.device) -> dict[str, Any]:
    found = devices.device_facts(device)
    ranks = max(group.node_sizes)
    memory_bytes = found.memory_bytes or find_memory().usable_bytes // ranks
    return {
        "machine": platform.node(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "library": library_name(),
        "torch": torch.__version__,
        "ranks": group.size,
        "nodes": group.nodes,
        "ranks_per_node": ranks,
        "threads": torch.get_num_threads(),
        "device": found.name or f"CPU, {platform.machine()}",
        "kind": found.kind,
        "memory_gb": memory_bytes / 1e9,
    }


def _shared_sums(bench: Bench, group: Group) -> dict[str, dict[str, list[float]]]:
    """Curves of the sums and gatherings of float32 in shared memory, by the values of the whole array."""
    memory = shared_zeros(SETS * SUM_VALUES[-1], group)
    curves: dict[str, dict[str, list[float]]] = {}
    for name in ("allreduce", "reduce_scatter", "allgather"):
        seconds = [bench.seconds(_maker(name, memory, n, group), 4.0 * n) for n in SUM_VALUES]
        curves[name] = {"sizes": [*map(float, SUM_VALUES)], "seconds": [float(f"{each:.3e}") for each in seconds]}
    return curves


def _maker(name: str, memory: torch.Tensor, n: int, group: Group) -> Callable[[], Callable[[], object]]:
    """Maker of calls on arrays one after another in memory, from its start again where it ends."""
    places = itertools.cycle(range(memory.numel() // n))
    start, end = chunk_range(n, group.size, group.rank)

    def make() -> Callable[[], object]:
        place = next(places) * n
        x = memory[place : place + n]
        own = x[start:end]
        return collective_call(name, *((own, x) if name == "allgather" else (x, own.clone())), group)

    return make


def _precisions(text: str, device: torch.device) -> list[str]:
    """Names of the precisions to measure. Raises ConfigError."""
    names = text.split(",") if text else ["fp32"] if device.type == "cpu" else ["fp32", "bf16"]
    for name in names:
        if name not in PRECISIONS:
            raise ConfigError(f"--precisions {name!r} is unknown; valid: {', '.join(PRECISIONS)}")
    return names


def _summary(results: dict[str, Any]) -> str:
    facts = results["measured"]
    best = {name: max(kernels["products"]["forward"]) for name, kernels in results["kernels"].items()}
    rates = ", ".join(f"{name} {rate:.3g} TFLOP/s" for name, rate in best.items())
    where = f"{counted(facts['ranks'], 'rank')} on {counted(facts['nodes'], 'node')}"
    return f"{where}, {facts['device']}, large products {rates}"
