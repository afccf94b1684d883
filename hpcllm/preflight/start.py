"""The part of a preflight that every start of a run makes: facts and their checks, no measurement, well under a second.

facts of all ranks -> rank 0 -> breaks: nobody starts, and all say why     slow: a line for each, and on
                                then each rank is bound to its cores
"""

from __future__ import annotations

import dataclasses
import sys
import time

from mpi4py import MPI

from hpcllm.binding import Binding, bind
from hpcllm.device import slot
from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.hardware.memory import find_room
from hpcllm.hardware.node import find_hardware, node_name
from hpcllm.launched import launched_ranks, launcher
from hpcllm.preflight.checks import check
from hpcllm.preflight.collect import rank_facts
from hpcllm.preflight.facts import Allocation, Gauges, RankFacts
from hpcllm.preflight.findings import Finding
from hpcllm.preflight.gather import Crew, Own, gather, open_crew
from hpcllm.preflight.page import one_line
from hpcllm.together import on_root, raise_together
from hpcllm.waiting import Waits


def start(world: MPI.Intracomm, wish: str, limit_s: float) -> Binding:
    """Check the allocation, then bind this rank to its cores. Collective over world.

    wish: run.device. limit_s: of waits. Raises ConfigError, StallError, and HpcllmError where a run would break.
    """
    crew = open_crew(world, Waits(limit_s))
    mine = facts_of_all(crew, wish)
    allocation = find_allocation(crew, mine)
    on_root(world, lambda: _say(check(allocation) if allocation else []))
    binding = bind(crew.node, mine.device.numa if mine.device else None)
    crew.free()
    return binding


def facts_of_all(crew: Crew, wish: str) -> RankFacts:
    """Of this rank. Collective over crew.world. Raises ConfigError on all ranks if the wish cannot be met on one."""
    mine, refusal = None, None
    try:
        mine = rank_facts(wish, slot(crew.node.rank))
    except ConfigError as error:
        refusal = error
    raise_together(crew.world, refusal)
    assert mine
    return mine


def find_allocation(crew: Crew, mine: RankFacts, source: str = "", others_cores: float = 0.0) -> Allocation | None:
    """On rank 0; None elsewhere. Collective over crew.world.

    source: of the text of this package. others_cores: see Gauges; both from first ranks of nodes. Raises StallError.
    """
    crew.arrive("to start")  # so that clocks are read at about one time
    own = None
    if crew.leads:
        room = find_room()
        gauges = Gauges(room.available_bytes, room.shared_bytes, time.time(), others_cores)
        hardware = find_hardware()
        hardware = dataclasses.replace(hardware, memory=hardware.memory.rounded())
        own = Own(node_name(), hardware, gauges, source)
    nodes = gather(crew, mine, own)
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
