"""Matrix products on all ranks at once: who is slower than the others. A step waits for the slowest rank.

rank 0   A B  A B  A B  ...            for BUDGET_S; the median product counts, on the rank's device or its cores
rank 1   A B    A B    A B             slower
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from hpcllm.preflight.collect import Communicators
from hpcllm.preflight.facts import Allocation
from hpcllm.preflight.findings import MOST_NODES, Finding, severity_of, slow_ones, without
from hpcllm.preflight.page import Measured
from hpcllm.system import device
from hpcllm.system.slurm import nodes_text
from hpcllm.system.text import counted

BUDGET_S = 2.0
SIZES = {"cpu": 512, "cuda": 8192, "xpu": 8192}  # rows and columns; other devices as the CPU
MOST_FINDINGS = 8


def measure(comms: Communicators, chosen: torch.device, allocation: Allocation | None) -> Measured | None:
    """The result, on rank 0. Collective over comms.world. Raises StallError."""
    comms.arrive("to multiply matrices")
    try:
        speed = gflop_s(chosen)
    except RuntimeError:  # no memory left on a device that others use; NaN is told as a finding
        speed = math.nan
    comms.arrive("to have multiplied matrices")
    speeds = np.empty(comms.world.size if comms.world.rank == 0 else 0)
    comms.world.Gather(np.array([speed]), speeds if comms.world.rank == 0 else None)
    return judge(speeds.tolist(), chosen.type, allocation) if allocation else None


def gflop_s(chosen: torch.device, budget_s: float = BUDGET_S) -> float:
    """GFLOP/s of this rank: bf16 on a device, fp32 on the CPU. Raises RuntimeError."""
    n = SIZES.get(chosen.type, SIZES["cpu"])
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    # random: products of ones take so little power that a device which is too hot to keep its clock would look sound
    a, b = (torch.randn(n, n, dtype=dtype, device=chosen) for _ in range(2))
    out = torch.empty_like(a)
    seconds: list[float] = []
    torch.mm(a, b, out=out)  # the first one sets things up
    device.synchronize(chosen)
    end_s = time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        torch.mm(a, b, out=out)
        device.synchronize(chosen)
        seconds.append(time.perf_counter() - start_s)
    return 2 * n**3 / statistics.median(seconds) / 1e9 if seconds else math.nan


def judge(speeds: Sequence[float], kind: str, allocation: Allocation) -> Measured:
    """speeds: GFLOP/s of each rank. Pure."""
    known = [speed for speed in speeds if not math.isnan(speed)]
    names = {rank: node.name for node in allocation.nodes for rank in node.ranks}
    several = len(allocation.nodes) > 1
    by_node: dict[str, tuple[float, list[int]]] = {}
    for rank, share in slow_ones(speeds):
        worst, ranks = by_node.get(names[rank], (0.0, []))
        by_node[names[rank]] = max(worst, share), [*ranks, rank]
    findings = [
        Finding(
            severity_of(share, speeds),
            f"{f'node {name}: ' if several else ''}{100 * share:.0f} % slow in matrix products",
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MOST_FINDINGS]))} on {name}",
            without(allocation, [name]),
        )
        for name, (share, ranks) in sorted(by_node.items(), key=lambda item: -item[1][0])[:MOST_FINDINGS]
    ]
    if failed := [names[rank] for rank, speed in enumerate(speeds) if math.isnan(speed)]:
        where = nodes_text(failed, MOST_NODES)
        findings.append(Finding("breaks", "a matrix product failed", where, without(allocation, failed)))
    text = "none succeeded"
    if known:
        what = "fp32 on the cores of a rank" if kind == "cpu" else "bf16 on its device"
        rates = f"{statistics.median(known):.3g} GFLOP/s a rank ({min(known):.3g} to {max(known):.3g})"
        text = f"{rates}, {what}, {counted(len(known), 'rank')} at once"
    return Measured("matrix products", text, {"gflop_s": [round(s, 3) for s in speeds]}, findings)
