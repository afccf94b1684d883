"""`step`: one training step under several communication policies, in turns.

    RUN.toml --+-- policy none   --> run --+
               +-- policy hpcllm --> run --+--> step, step, step, step ...    A B A B: drift hits all alike

The model is trained while it is measured, so values are real gradients; nothing is written to the run folder. Traffic
is never exact here: `exact_steps` are the first of a run, and this measures the others. With --calibrate no run is
timed, but what the planner needs to know of the machine: calibrate.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from mpi4py import MPI

from hpcllm.collectives import group_of
from hpcllm.config import schema as configs
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError
from hpcllm.finetuning.preferences import Preferences
from hpcllm.mpi.collective_errors import on_root
from hpcllm.perf import calibrate
from hpcllm.system.device import synchronize
from hpcllm.system.output import show
from hpcllm.system.text import table
from hpcllm.training.log import KINDS, TRAFFIC, Traffic
from hpcllm.training.objective import NEXT_TOKEN, Objective
from hpcllm.training.setup import RunContext, open_run
from hpcllm.training.step import forward_backward


def run(arguments: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Measure and print. Collective over comm. Raises UserError."""
    if arguments.calibrate:
        return calibrate.run(arguments, comm)
    if arguments.run is None:
        raise ConfigError("step needs RUN.toml, a run file as for `hpcllm train`, or --calibrate")
    tables = on_root(comm, lambda: configs.to_tables(configs.load(arguments.run, arguments.overrides)))
    if tables["finetuning"]["kind"] == "grpo":
        raise ConfigError(
            "finetuning.kind = 'grpo': a step takes as long as its texts are; a run's log.jsonl has generation_s and "
            "step_s; valid here: another kind"
        )
    records = measure(configs.from_tables(tables), arguments.policies, arguments.steps, arguments.warmup, comm)
    if comm.rank == 0:
        show(arguments, records, _table(records))
    return 0


def measure(config: Config, policies: Sequence[str], steps: int, warmup: int, comm: MPI.Intracomm) -> list[Any]:
    """One record a policy; times are those of the slowest rank. Collective over comm."""
    with ExitStack() as stack:
        each = [_with_policy(config, policy) for policy in policies]
        runs = [stack.enter_context(open_run(one, comm, _objective(one))) for one in each]
        times: list[list[float]] = [[] for _ in runs]
        traffic = [run.traffic() for run in runs]
        for number in range(warmup + steps):
            if number == warmup:
                traffic = [run.traffic() for run in runs]
            for run, seconds in zip(runs, times, strict=True):
                seconds.append(_step_s(run, number, comm))
        return [
            _record(policy, run, seconds[warmup:], (run.traffic() - before) / steps, comm)
            for policy, run, seconds, before in zip(policies, runs, times, traffic, strict=True)
        ]


def _objective(config: Config) -> Objective:
    """Return what a step learns; texts that are to be written first have no place in a measurement."""
    finetuning = config.finetuning
    return Preferences(finetuning.beta) if finetuning.kind == "dpo" else NEXT_TOKEN


def _with_policy(config: Config, policy: str) -> Config:
    tables = configs.to_tables(config)
    tables["communication"] |= {"policy": policy, "exact_steps": 0}
    return configs.from_tables(tables)


def _step_s(run: RunContext, number: int, comm: MPI.Intracomm) -> float:
    run.control.all([comm.Ibarrier()], lambda: "all ranks to begin a timed step")
    start = time.perf_counter()
    forward_backward(run, number, number * run.config.data.global_batch)
    run.optimizer.update(run.config.optimizer.learning_rate, 1.0)
    synchronize(run.device)  # or the update would be a part of the next step's time, of another policy
    return time.perf_counter() - start


def _record(
    policy: str, run: RunContext, seconds: list[float], traffic: Traffic, comm: MPI.Intracomm
) -> dict[str, Any]:
    slowest = [max(of_a_step) for of_a_step in zip(*comm.allgather(seconds), strict=True)]
    sums = dict(zip(TRAFFIC, sum(comm.allgather(traffic)).tolist(), strict=True))
    data = run.config.data
    record = {
        "operation": "step",
        "policy": policy,
        "codecs": configs.traffic_codecs(run.config.communication),
        **run.mesh.shape,
        "ranks": comm.size,
        "nodes": group_of(comm).nodes,
        "parameters": comm.allreduce(sum(run.parameters[name].numel() for name in run.owned)) // run.mesh.dp.size,
        "tokens": data.global_batch * data.sequence_length,
        "median_s": median(slowest),
        "min_s": min(slowest),
        "max_s": max(slowest),
        "tokens_per_s": data.global_batch * data.sequence_length / median(slowest),
        "exposed_s": sums["exposed_s"] / comm.size,
        "hidden_s": sums["hidden_s"] / comm.size,
        "library": MPI.Get_library_version().splitlines()[0].strip(),
    }
    return record | {f"{kind}_{what}": sums[f"{kind}_{what}"] for kind in KINDS for what in ("plain_bytes", "bytes")}


def _table(records: list[dict[str, Any]]) -> list[str]:
    rows = []
    for record in records:
        times = [f"{1e3 * record[key]:.1f}" for key in ("exposed_s", "hidden_s")]
        sent_mb = sum(record[f"{kind}_bytes"] for kind in KINDS) / 1e6
        speed_up = f"{records[0]['median_s'] / record['median_s']:.2f}"
        speed = [f"{1e3 * record['median_s']:.1f}", f"{record['tokens_per_s']:,.0f}", speed_up]
        rows.append([record["policy"], *speed, *times, f"{sent_mb:.2f}"])
    return table(["policy", "step ms", "tokens/s", "speed-up", "exposed ms", "hidden ms", "MB sent"], rows, indent="")
