"""What a start of a run spends, and on what: seconds of the loop by kind, joules, hours of nodes and devices.

    each rank     laps.py: seconds -----.
    one a node    meter.py: joules -----+--> the sum that ends each step --> rank 0: Account, and the parts of a step
                                                                             in the record of each logged step

Nothing here sends a message of its own while steps are made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hpcllm import STARTED_S
from hpcllm.assemble import Parts
from hpcllm.config import EnergyConfig
from hpcllm.device import facts, same_device
from hpcllm.energy.account import Account
from hpcllm.energy.meter import FINDERS, Joules, Meter, find_source, metering
from hpcllm.energy.source import SCOPES, MissingSourceError
from hpcllm.errors import ConfigError
from hpcllm.hardware.node import allowed_cores
from hpcllm.laps import BETWEEN, PARTS, STEP, Laps, split
from hpcllm.metrics import Log, Record
from hpcllm.model.tensor_parallel import traffic
from hpcllm.surroundings import now, surroundings
from hpcllm.together import on_root, raise_together

SECONDS = (*STEP, *BETWEEN, "waited", "tensor_wait")
SPENT = (*SECONDS, "joules", "gpu_joules", "meters")  # of one rank; the last: whether its node's energy is being read
Spent = NDArray[np.float64]  # (len(SPENT),)
NOTHING_SPENT: Spent = np.zeros(len(SPENT))


@dataclass
class Spending:
    """The same calls on all ranks. log: rank 0's. meters: nodes whose energy is read."""

    parts: Parts
    log: Log | None
    meter: Meter | None
    account: Account
    scope: str  # what is measured, for people; "" if nothing is
    laps: Laps
    meters: int
    _reported: Spent = field(default_factory=lambda: NOTHING_SPENT)
    _steps: int = 0
    _sums: Spent = field(default_factory=lambda: NOTHING_SPENT)  # of those steps, over the ranks

    def passes_done(self, input_s: float) -> Spent:
        """After a step's passes, of which reading samples took input_s: what this rank has spent since the last time.

        To be summed over all ranks, and given to `add`.
        """
        self.laps.end("compute", input_s)
        so_far = self._so_far()
        spent, self._reported = so_far - self._reported, so_far
        spent[-1] = so_far[-1]
        return spent

    def add(self, spent: Spent) -> None:
        """Of one step, summed over all ranks."""
        self._steps, self._sums = self._steps + 1, self._sums + spent
        sums = dict(zip(SPENT, spent.tolist(), strict=True))
        self._book(sums["joules"], sums["gpu_joules"])
        data = self.parts.config.data
        measured = sums["meters"] / self.account.nodes  # tokens a kWh stay right where some nodes tell nothing
        self.account.tokens += round(measured * data.global_batch * data.sequence_length)
        if sums["meters"] < self.meters:
            lost, self.meters = self.meters - round(sums["meters"]), round(sums["meters"])
            why = f": {self.meter.lost}" if self.meter and self.meter.lost else ""
            self._say(f"energy can no longer be read on {lost} of {self.account.nodes} nodes{why}; the run goes on")

    def record(self, step_s: float) -> Record:
        """Keys of a logged step of step_s seconds in the mean: its parts, what lay between steps, and all so far."""
        ranks = self.parts.mesh.world.size
        means = dict(zip(SPENT, (self._sums / max(self._steps, 1) / ranks).tolist(), strict=True))
        parts = split(step_s, means, means["tensor_wait"], self.parts.bubble)
        self._steps, self._sums = 0, NOTHING_SPENT
        found = {f"time_{name}_s": parts[name] for name in PARTS}
        return found | {f"time_{name}_s": means[name] for name in BETWEEN} | self.so_far()

    def so_far(self) -> Record:
        """Of all starts of the run."""
        return self.account.record(time.monotonic() - STARTED_S)

    def over(self, step: int, stopped_by: str) -> Record:
        """The last words of a start, for the log and for the table that ends it. Collective over the mesh."""
        rest = self._so_far(last=True) - self._reported
        energy = rest[[SPENT.index("joules"), SPENT.index("gpu_joules")]]
        self.parts.control.allreduce(
            self.parts.mesh.world, energy, lambda: "all nodes to say how much energy they took"
        )
        self._book(*energy.tolist())
        total: Record = on_root(self.parts.mesh.world, self.so_far)  # by one clock
        if self.scope:
            total["energy_scope"] = self.scope
        if self.log:
            self.log.note({"step": step, "end": {"time": now(), "stopped_by": stopped_by}, **total})
        return total

    def _so_far(self, last: bool = False) -> Spent:
        energy = self.meter.joules(last) if self.meter else Joules(0.0, 0.0)
        is_read = self.meter is not None and not self.meter.lost
        waits = [self.laps.seconds["waited"], traffic(self.parts.tp)[0]]
        return np.array([*(self.laps.seconds[lap] for lap in (*STEP, *BETWEEN)), *waits, *energy, is_read])

    def _book(self, joules: float, gpu_joules: float) -> None:
        self.account.joules += joules
        self.account.gpu_joules += gpu_joules

    def _say(self, text: str) -> None:
        if self.log:
            self.log.say(text)


@contextmanager
def open_spending(parts: Parts, log: Log | None, step: int) -> Iterator[Spending]:
    """The account of a start that goes on from `step`, told to the log. Collective. Raises ConfigError."""
    mesh, config = parts.mesh, parts.config.energy
    with ExitStack() as stack:
        meter, why_none = _open_meter(parts, config, stack)
        is_gpu, here = _devices_here(parts)
        leads = mesh.node.rank == 0
        kinds = [meter is not None and meter.source.name == name for name in FINDERS]
        counts = np.array([leads, here if leads else 0, _hidden(meter, here if is_gpu else 0), *kinds])
        parts.control.allreduce(mesh.world, counts, lambda: "all nodes to say what they measure")
        nodes, devices, hidden, *metered = (round(count) for count in counts.tolist())
        meters = {name: count for name, count in zip(FINDERS, metered, strict=True) if count}
        before = on_root(mesh.world, lambda: log.before if log else {})
        measured = bool(meters) or "energy_kwh" in before
        account = Account(nodes, devices, "gpu" if is_gpu else "core", measured, config, before)
        scope = _scope(meters, nodes) + (f", without {hidden} of {devices} GPUs, which are hidden" if hidden else "")
        spending = Spending(parts, log, meter, account, scope, _laps(parts), sum(meters.values()))
        if log:
            for line in [f"energy: {scope}"] if scope else [why_none] if why_none else []:
                log.say(line)
            log.note({"step": step, "start": surroundings(parts, nodes, devices) | {"energy_scope": scope}})
        yield spending


def _open_meter(parts: Parts, config: EnergyConfig, stack: ExitStack) -> tuple[Meter | None, str]:
    """On the lowest rank of each node: its meter, or a line on what it has and may not read.

    Collective over the mesh. Raises ConfigError.
    """
    meter, why_none, error = None, "", None
    if parts.mesh.node.rank == 0 and config.source != "none":
        try:
            source = find_source(config.source, Path(config.sysfs), parts.device.type != "cpu")
            meter = stack.enter_context(metering(source))
        except MissingSourceError as failure:
            why_none = f"energy is not measured: {failure}" if failure.is_there else ""
            if config.source != "auto":
                error = ConfigError(
                    f"energy.source = {config.source!r} is not to be had on {MPI.Get_processor_name()}: {failure}; "
                    f"valid: another of {', '.join(FINDERS)}, 'auto' to take what is there, or 'none'"
                )
    raise_together(parts.mesh.world, error)
    return meter, why_none


def _devices_here(parts: Parts) -> tuple[bool, int]:
    """Whether the ranks compute on GPUs; how many GPUs, or cores, those of this node have. Collective over the node."""
    device = parts.device
    if device.type == "cpu":
        mine = f"{sum(1 << core for core in allowed_cores()):x}"
        cores = 0
        for mask in parts.mesh.node.allgather(mine):
            cores |= int(mask, 16)
        return False, cores.bit_count()
    return True, len(set(parts.mesh.node.allgather(same_device(facts(device), os.environ))))


def _hidden(meter: Meter | None, devices: int) -> int:
    """Devices of the node that NVML does not show to its lowest rank, as where each rank sees its own alone."""
    return max(0, devices - len(meter.source.counted)) if meter and meter.source.name == "nvml" else 0


def _scope(meters: Mapping[str, int], nodes: int) -> str:
    """'GPUs only (nvml), 3 of 4 nodes'; "" where nothing is measured. meters: source -> nodes that have it."""
    if not meters:
        return ""
    kinds = [f"{SCOPES[name]} ({name})" for name in meters]
    if len(meters) > 1:
        kinds = [f"{kind} on {count}" for kind, count in zip(kinds, meters.values(), strict=True)]
    elif sum(meters.values()) < nodes:
        kinds.append(f"{sum(meters.values())}")
    return ", ".join(kinds) + (f" of {nodes} nodes" if len(kinds) > 1 else "")


def _laps(parts: Parts) -> Laps:
    return Laps(lambda: float(parts.traffic()[0]) + parts.control.total_s)
