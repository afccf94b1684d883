"""The part of a preflight that every start of a run makes: facts and their checks, no measurement, well under a second.

facts of all ranks -> rank 0 -> breaks: nobody starts, and all say why     slow: a line for each, and on
                                then each rank is bound to its cores
"""

from __future__ import annotations

import dataclasses
import sys
import time

from mpi4py import MPI

from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed
from hpcllm.mpi.wait import Waits
from hpcllm.preflight.checks import check
from hpcllm.preflight.collect import Communicators, NodeReport, gather, open_communicators, rank_facts
from hpcllm.preflight.facts import Allocation, Gauges, RankFacts
from hpcllm.preflight.findings import Finding
from hpcllm.preflight.page import one_line
from hpcllm.system.affinity import Affinity, set_affinity
from hpcllm.system.device import local_rank
from hpcllm.system.hardware.node import find_free_memory, find_hardware, node_name
from hpcllm.system.job import launched_ranks, launcher


def start(world: MPI.Intracomm, wanted: str, limit_s: float) -> Affinity:
    """Check the allocation, then bind this rank to its cores. Collective over world.

    wanted: run.device. limit_s: of waits. Raises ConfigError, StallError, and HpcllmError where a run would break.
    """
    comms = open_communicators(world, Waits(limit_s))
    mine = facts_of_all(comms, wanted)
    allocation = find_allocation(comms, mine)
    on_root(world, lambda: _say(check(allocation) if allocation else []))
    affinity = set_affinity(comms.node, mine.device.numa if mine.device else None)
    comms.free()
    return affinity


def facts_of_all(comms: Communicators, wanted: str) -> RankFacts:
    """Facts of this rank. Collective over comms.world.

    Raises ConfigError on all ranks if one of them cannot have the device that it is to have.
    """
    mine, refusal = None, None
    try:
        mine = rank_facts(wanted, local_rank(comms.node.rank))
    except ConfigError as error:
        refusal = error
    raise_if_any_failed(comms.world, refusal)
    assert mine
    return mine


def find_allocation(
    comms: Communicators, mine: RankFacts, source: str = "", others_cores: float = 0.0
) -> Allocation | None:
    """Facts of the whole allocation, on rank 0; None elsewhere. Collective over comms.world.

    source: of the text of this package. others_cores: see Gauges; both from first ranks of nodes. Raises StallError.
    """
    comms.arrive("to start")  # so that clocks are read at about one time
    own = None
    if comms.leads:
        room = find_free_memory()
        gauges = Gauges(room.available_bytes, room.shared_bytes, time.time(), others_cores)
        hardware = find_hardware()
        hardware = dataclasses.replace(hardware, memory=hardware.memory.rounded())
        own = NodeReport(node_name(), hardware, gauges, source)
    nodes = gather(comms, mine, own)
    return Allocation(tuple(nodes), launcher(), launched_ranks()) if nodes else None


def _say(findings: list[Finding]) -> None:
    """Raises HpcllmError."""
    for finding in findings:
        if finding.severity == "slow":
            print(f"hpcllm: preflight: {one_line(finding)}", file=sys.stderr, flush=True)
    breaks = [one_line(finding) for finding in findings if finding.severity == "breaks"]
    if breaks:
        more = "; see all of it with `python -m hpcllm preflight`, started in the same way"
        raise HpcllmError(f"this allocation is not fit to run: {'; '.join(breaks)}{more}")
