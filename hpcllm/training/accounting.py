"""Account of a start of a run: seconds of the loop by kind, joules, hours of nodes and devices.

    each rank     step_timer.py: seconds --.
    one a node    meter.py: joules --------+--> the sum that ends each step --> rank 0: Account, and the parts of a
                                                                                step in the record of each logged step

No message of its own is sent while steps are made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from hpcllm import STARTED_S
from hpcllm.config.schema import EnergyConfig
from hpcllm.errors import ConfigError
from hpcllm.model.tensor_parallel import traffic
from hpcllm.mpi.collective_errors import on_root, raise_if_any_failed
from hpcllm.system.device import device_facts, device_identity
from hpcllm.system.energy.account import Account
from hpcllm.system.energy.meter import Joules, Meter, metering
from hpcllm.system.energy.sources import FINDERS, SCOPES, MissingSourceError, find_source
from hpcllm.system.hardware.node import allowed_cores
from hpcllm.training.log import Log, Record
from hpcllm.training.run_info import run_info, utc_now
from hpcllm.training.step_timer import BETWEEN, NOTHING_SPENT, PARTS, SPENT, STEP, Spent, StepTimer, split

if TYPE_CHECKING:
    from hpcllm.training.setup import RunContext


@dataclass
class Accounting:
    """Adds up what all ranks spend. Called alike on all ranks."""

    run: RunContext
    log: Log | None  # rank 0's
    meter: Meter | None  # of the lowest rank of a node
    account: Account
    scope: str  # what is measured, for people; "" if nothing is
    timer: StepTimer
    meters: int  # number of nodes whose energy is read
    _reported: Spent = field(default_factory=lambda: NOTHING_SPENT)
    _steps: int = 0  # since the last record
    _sums: Spent = field(default_factory=lambda: NOTHING_SPENT)  # over those steps and all ranks

    def end_passes(self, input_s: float) -> Spent:
        """Return what this rank has spent since the last call; to be summed over all ranks and given to `end_update`.

        input_s: seconds of reading samples in the passes that have just ended.
        """
        self.timer.end("compute", input_s)
        so_far = self._spent_so_far()
        spent, self._reported = so_far - self._reported, so_far
        spent[-1] = so_far[-1]
        return spent

    def end_update(self, spent: Spent) -> None:
        """End a step, whose update has just been made. spent: what `end_passes` returned, summed over all ranks."""
        self.timer.end("optimizer")
        self._steps, self._sums = self._steps + 1, self._sums + spent
        sums = dict(zip(SPENT, spent.tolist(), strict=True))
        self.account.joules += sums["joules"]
        self.account.gpu_joules += sums["gpu_joules"]
        data = self.run.config.data
        measured = sums["meters"] / self.account.nodes  # tokens a kWh stay right where some nodes are not measured
        self.account.tokens += round(measured * data.global_batch * data.sequence_length)
        if sums["meters"] < self.meters:
            lost, self.meters = self.meters - round(sums["meters"]), round(sums["meters"])
            why = f": {self.meter.lost}" if self.meter and self.meter.lost else ""
            if self.log:
                line = f"energy can no longer be read on {lost} of {self.account.nodes} nodes{why}; the run goes on"
                self.log.print(line)

    def record(self, step_s: float) -> Record:
        """Return the keys of a logged step of mean length step_s: its parts, time between steps, totals so far."""
        ranks = self.run.mesh.world.size
        means = dict(zip(SPENT, (self._sums / max(self._steps, 1) / ranks).tolist(), strict=True))
        parts = split(step_s, means, means["tensor_wait"], self.run.bubble)
        self._steps, self._sums = 0, NOTHING_SPENT
        times = {**parts, **{name: means[name] for name in BETWEEN}}
        return {f"time_{name}_s": times[name] for name in (*PARTS, *BETWEEN)} | self.totals()

    def totals(self) -> Record:
        """Return hours, energy and cost of all starts of the run."""
        return self.account.record(time.monotonic() - STARTED_S)

    def close(self, step: int, stopped_by: str) -> Record:
        """Write the last record of this start and return its totals. Collective over the mesh."""
        rest = self._spent_so_far(last=True) - self._reported
        energy = rest[[SPENT.index("joules"), SPENT.index("gpu_joules")]]
        self.run.control.allreduce(self.run.mesh.world, energy, lambda: "all nodes to say how much energy they took")
        joules, gpu_joules = energy.tolist()
        self.account.joules += joules
        self.account.gpu_joules += gpu_joules
        total: Record = on_root(self.run.mesh.world, self.totals)  # by one clock
        if self.scope:
            total["energy_scope"] = self.scope
        if self.log:
            self.log.write({"step": step, "end": {"time": utc_now(), "stopped_by": stopped_by}, **total})
        return total

    def _spent_so_far(self, last: bool = False) -> Spent:
        energy = self.meter.joules(last) if self.meter else Joules(0.0, 0.0)
        is_read = self.meter is not None and not self.meter.lost
        waits = [self.timer.seconds["waited"], traffic(self.run.tp)[0]]
        return np.array([*(self.timer.seconds[name] for name in (*STEP, *BETWEEN)), *waits, *energy, is_read])


@contextmanager
def open_accounting(run: RunContext, log: Log | None, step: int) -> Iterator[Accounting]:
    """Begin the account of a start that goes on from `step`, and log it. Collective. Raises ConfigError."""
    mesh, config = run.mesh, run.config.energy
    with ExitStack() as stack:
        meter, why_none = _open_meter(run, config, stack)
        is_gpu, here = _devices_here(run)
        leads = mesh.node.rank == 0
        kinds = [meter is not None and meter.source.name == name for name in FINDERS]
        counts = np.array([leads, here if leads else 0, _hidden(meter, here if is_gpu else 0), *kinds])
        run.control.allreduce(mesh.world, counts, lambda: "all nodes to say what they measure")
        nodes, devices, hidden, *metered = (round(count) for count in counts.tolist())
        meters = {name: count for name, count in zip(FINDERS, metered, strict=True) if count}
        before = on_root(mesh.world, lambda: log.before if log else {})
        measured = bool(meters) or "energy_kwh" in before
        account = Account(nodes, devices, "gpu" if is_gpu else "core", measured, config, before)
        scope = _scope(meters, nodes) + (f", without {hidden} of {devices} GPUs, which are hidden" if hidden else "")
        timer = StepTimer(lambda: float(run.traffic()[0]) + run.control.total_s)
        if log:
            for line in [f"energy: {scope}"] if scope else [why_none] if why_none else []:
                log.print(line)
            log.write({"step": step, "start": run_info(run, nodes, devices) | {"energy_scope": scope}})
        yield Accounting(run, log, meter, account, scope, timer, sum(meters.values()))


def _open_meter(run: RunContext, config: EnergyConfig, stack: ExitStack) -> tuple[Meter | None, str]:
    """Open the meter of each node on its lowest rank, or return why what the node has may not be read.

    Collective over the mesh. Raises ConfigError.
    """
    meter, why_none, error = None, "", None
    if run.mesh.node.rank == 0 and config.source != "none":
        try:
            source = find_source(config.source, run.device.type != "cpu")
            meter = stack.enter_context(metering(source))
        except MissingSourceError as failure:
            why_none = f"energy is not measured: {failure}" if failure.is_there else ""
            if config.source != "auto":
                error = ConfigError(
                    f"energy.source = {config.source!r} is not available on {MPI.Get_processor_name()}: {failure}; "
                    f"valid: another of {', '.join(FINDERS)}, 'auto' to take what is there, or 'none'"
                )
    raise_if_any_failed(run.mesh.world, error)
    return meter, why_none


def _devices_here(run: RunContext) -> tuple[bool, int]:
    """Return (true for GPUs, number of GPUs or cores that the ranks of this node have). Collective over the node."""
    if run.device.type == "cpu":
        mine = f"{sum(1 << core for core in allowed_cores()):x}"
        cores = 0
        for mask in run.mesh.node.allgather(mine):
            cores |= int(mask, 16)
        return False, cores.bit_count()
    return True, len(set(run.mesh.node.allgather(device_identity(device_facts(run.device), os.environ))))


def _hidden(meter: Meter | None, devices: int) -> int:
    """Number of the node's devices that NVML hides from its lowest rank, as where each rank sees its own alone."""
    return max(0, devices - len(meter.source.counted)) if meter and meter.source.name == "nvml" else 0


def _scope(meters: Mapping[str, int], nodes: int) -> str:
    """Describe what is measured: 'GPUs only (nvml), 3 of 4 nodes'; "" for nothing. meters: source -> its nodes."""
    if not meters:
        return ""
    kinds = [f"{SCOPES[name]} ({name})" for name in meters]
    if len(meters) > 1:
        kinds = [f"{kind} on {count}" for kind, count in zip(kinds, meters.values(), strict=True)]
    elif sum(meters.values()) < nodes:
        kinds.append(f"{sum(meters.values())}")
    return ", ".join(kinds) + (f" of {nodes} nodes" if len(kinds) > 1 else "")
