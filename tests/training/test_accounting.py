"""What real runs say they spent: parts of a step that add up, joules of all nodes and of all starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import energy_nodes as nodes
import numpy as np
import pytest
import small_runs

from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError
from hpcllm.system.energy import sources
from hpcllm.system.job import StopSignals
from hpcllm.training.accounting import _scope, open_accounting
from hpcllm.training.loop import train
from hpcllm.training.setup import open_run
from hpcllm.training.step_timer import BETWEEN, PARTS, SPENT
from hpcllm.training.summary import Summary

TICK_S = 0.005


def run(config: Config, comm) -> tuple[Summary, list[dict]]:
    """Train; the closing table, and all records of the log."""
    with StopSignals() as signals:
        summary = train(config, comm, signals)
    comm.Barrier()  # rank 0 has closed its log
    lines = (Path(config.run.folder) / config.run.name / "log.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def folder_of(comm, name: str) -> Path:
    """Empty, and the same on all ranks."""
    folder = small_runs.store().parent / f"accounting {comm.size}" / name
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    comm.Barrier()
    return folder


@contextmanager
def burning(sysfs: Path, joules_a_tick: float) -> Iterator[None]:
    """While open the node's counter rises, from where it stands."""
    over, counter = threading.Event(), sysfs / "cray" / "pm_counters" / "energy"
    joules = float(counter.read_text().split()[0]) if counter.exists() else 0.0

    def burn() -> None:
        nonlocal joules
        while not over.wait(TICK_S) and sysfs.exists():
            joules += joules_a_tick
            aside = sysfs / "cray" / "energy.tmp"
            if aside.parent.exists():
                aside.write_text(f"{joules:.0f} J 1 us\n")
                aside.replace(counter)

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("meters", "nodes", "said"),
    [
        ({}, 4, ""),
        ({"nvml": 4}, 4, "GPUs only (nvml)"),
        ({"nvml": 3}, 4, "GPUs only (nvml), 3 of 4 nodes"),
        ({"pm_counters": 2, "rapl": 1}, 4, "whole nodes (pm_counters) on 2, CPUs only (rapl) on 1 of 4 nodes"),
    ],
)
def test_what_is_measured_is_named_and_where(meters, nodes, said):
    assert _scope(meters, nodes) == said


@pytest.mark.parallel([1, 2, 3])
def test_the_parts_of_each_logged_step_add_up_to_it(comm):
    layout = {1: {}, 2: {"pp": 2}, 3: {"pp": 1}}[comm.size]
    config = small_runs.tiny(
        run={"name": "parts", "folder": str(folder_of(comm, "parts")), "steps": 6},
        mesh=layout,
        pipeline={"microbatches": 2},
        log={"every_steps": 2, "validation_every_steps": 3},
        checkpoint={"every_steps": 2},
    )
    _, records = run(config, comm)
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [2, 4, 6]
    for record in steps:
        assert sum(record[f"time_{part}_s"] for part in PARTS) == pytest.approx(record["step_s"])
        assert min(record[f"time_{part}_s"] for part in (*PARTS, *BETWEEN)) >= 0
        assert record["time_compute_s"] > 0
    assert steps[1]["time_checkpoint_s"] > 0 == steps[0]["time_checkpoint_s"]
    assert steps[1]["time_validation_s"] > 0 == steps[0]["time_validation_s"]
    assert (steps[0]["time_bubble_s"] > 0) == (config.mesh.pp > 1)


@pytest.mark.parallel([1, 2, 3])
def test_energy_of_all_nodes_is_their_sum_whoever_vanishes(comm, monkeypatch):
    """Each rank stands for a node, with a folder of its own."""
    sysfs = folder_of(comm, "nodes") / f"node {comm.rank}"
    nodes.cray(sysfs, 1000 * (comm.rank + 1), (100.0,))
    monkeypatch.setattr(sources, "SYSFS", sysfs)
    config = small_runs.tiny()
    with open_run(config, comm) as run:
        apart = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, node=comm.Split(comm.rank)))
        with open_accounting(apart, None, 0) as accounting:
            assert (accounting.account.nodes, accounting.meters) == (comm.size, comm.size)
            for k in range(1, 4):
                lost = k == 3 and comm.rank == comm.size - 1
                nodes.cray(sysfs, 1000 * (comm.rank + 1) + 60 * k, (100.0 + 5 * k,), freshness=k)
                if lost:
                    shutil.rmtree(sysfs)
                accounting.meter._read_s = -1.0  # as if time had passed
                mine = accounting.end_passes(0.0)
                total = np.empty_like(mine)
                comm.Allreduce(mine, total)
                accounting.end_update(total)
                joules = 60 * (k * comm.size - (k == 3))
                assert accounting.account.joules == pytest.approx(joules)
                assert accounting.account.gpu_joules == pytest.approx(joules / 12)
                assert total[SPENT.index("meters")] == accounting.meters == comm.size - (k == 3)


@pytest.mark.parallel([1, 2])
def test_a_run_goes_on_counting_where_its_last_start_ended(comm, monkeypatch):
    folder = folder_of(comm, "starts")
    nodes.cray(folder / "sys", 1e6)
    comm.Barrier()
    monkeypatch.setattr(sources, "SYSFS", folder / "sys")
    tables = {"energy": {"price_per_kwh": 0.5}, "checkpoint": {"every_steps": 4}}
    base = {"run": {"name": "r", "folder": str(folder)}, "log": {"every_steps": 1}}

    def start(steps: int) -> tuple[Summary, list[dict]]:
        config = small_runs.tiny(**tables, **{**base, "run": {**base["run"], "steps": steps}})
        with burning(folder / "sys", 100.0) if comm.rank == 0 else burning(Path("/nowhere"), 0.0):
            return run(config, comm)

    first, _ = start(6)
    second, records = start(10)
    assert second.taken["energy_kwh"] > first.taken["energy_kwh"] > 0
    assert second.taken["node_hours"] > first.taken["node_hours"]
    assert second.taken["cost"] == pytest.approx(0.5 * second.taken["energy_kwh"])
    assert second.taken["energy_scope"] == "whole nodes (pm_counters)"
    assert second.as_dict()["energy_kwh"] == second.taken["energy_kwh"]
    counted = [record["energy_kwh"] for record in records if "energy_kwh" in record]
    assert counted == sorted(counted)
    steps = [record for record in records if "loss" in record]
    tokens = small_runs.tiny().data.global_batch * small_runs.tiny().data.sequence_length
    assert [record["energy_tokens"] for record in steps] == [tokens * k for k in range(1, 11)]
    assert [record["step"] for record in records if "start" in record] == [0, 6]
    about = next(record["start"] for record in records if "start" in record)
    assert (about["ranks"], about["nodes"], about["device"]) == (comm.size, 1, "cpu")


@pytest.mark.parallel([1, 2])
def test_a_counter_that_goes_away_in_mid_run_is_said_once(comm, capfd, monkeypatch):
    folder = folder_of(comm, "lost")
    nodes.cray(folder / "sys", 1e6)
    comm.Barrier()
    monkeypatch.setattr(sources, "SYSFS", folder / "sys")
    config = small_runs.tiny(
        run={"name": "r", "folder": str(folder), "steps": 150},
        log={"every_steps": 5},
    )
    log = folder / "r" / "log.jsonl"

    def vanish() -> None:
        while not (log.exists() and '"loss"' in log.read_text()):
            time.sleep(TICK_S)
        shutil.rmtree(folder / "sys")

    thread = threading.Thread(target=vanish if comm.rank == 0 else lambda: None)
    thread.start()
    summary, _ = run(config, comm)
    thread.join()
    assert summary.step == 150
    said = capfd.readouterr().out.count("energy can no longer be read on 1 of 1 nodes: ")
    assert said == (comm.rank == 0)


@pytest.mark.parallel([1, 2])
def test_a_source_that_was_requested_and_is_not_there_is_rejected_on_all_ranks(comm, monkeypatch):
    folder = folder_of(comm, "none")
    monkeypatch.setattr(sources, "SYSFS", folder)
    config = small_runs.tiny(run={"name": "r", "folder": str(folder)}, energy={"source": "rapl"})
    with pytest.raises(ConfigError, match=r"energy.source = 'rapl' .*valid:"), StopSignals() as signals:
        train(config, comm, signals)
