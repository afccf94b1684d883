"""`perf step --calibrate`: a short one gives a machine file that loads and predicts a run of ours."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from hpcllm.collectives import group_of
from hpcllm.collectives import measure as measuring
from hpcllm.errors import ConfigError
from hpcllm.perf import arguments, calibrate, step
from hpcllm.perf.kernels import SHORT
from hpcllm.plan.machine import read_machine
from hpcllm.plan.prediction import predict
from hpcllm.plan.time.calibration import machine_text

MODEL = "layers=2,hidden=64,heads=2,ffn=176,gated=true,vocab=512,sequence=64"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(measuring, "BUDGET_S", 1e-3)
    monkeypatch.setattr(measuring, "LONG_BYTES", 1 << 16)
    monkeypatch.setattr(measuring, "BEYOND_CACHES_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "CODECS", ("int8:256", "exp"))
    monkeypatch.setattr(calibrate, "SUM_VALUES", (1 << 8, 1 << 16))
    monkeypatch.setattr(calibrate, "CPU", SHORT)


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_step_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parallel([1, 2])
def test_a_file_that_the_planner_reads(comm, shared_path):
    results = shared_path / "my results.json"
    assert step.run(given("--calibrate", "--json", str(results)), comm) == 0
    machine_file = shared_path / f"machine {comm.rank}.toml"
    machine_file.write_text(machine_text([results]), encoding="utf-8")
    machine = read_machine(machine_file)
    assert machine.device.family == "cpu"
    assert machine.device.per_node == comm.size
    assert machine.tuning is not None
    assert machine.device.measured is not None
    times = machine.device.measured.of(4)
    assert times is not None
    assert ("allreduce" in times.curves) == (comm.size > 1)
    for layout in [f"dp={comm.size}", f"tp={comm.size}", f"pp={comm.size}"]:
        found = predict(machine, MODEL, f"trainer=hpcllm,precision=fp32,{layout}", 2 * comm.size)
        assert 1e-4 < found.iteration_time_s < 10
        assert found.fits


@pytest.mark.parallel([1])
def test_a_product_takes_as_long_as_the_planner_says(comm):
    """Within a factor of three: this machine may have other things to do."""
    measured = calibrate.calibrate(group_of(comm), torch.device("cpu"), ["fp32"], SHORT)
    sizes, rates = (measured["kernels"]["fp32"]["products"][key] for key in ("sizes", "forward"))
    assert len(rates) == len(sizes) ** 3
    x, w = torch.ones(512, 512), torch.ones(512, 512)
    start, n = time.perf_counter(), 20
    for _ in range(n):
        torch.nn.functional.linear(x, w)
    tflops = n * 2e-12 * 512**3 / (time.perf_counter() - start)
    assert tflops / 3 < rates[-1] < 3 * tflops


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--calibrate"], "--json"),
        (["--calibrate", "--json", "no/such/folder/r.json"], "cannot write"),
        (["--calibrate", "--json", "r.json", "--precisions", "fp8"], "fp8.*valid: fp32"),
        ([], "RUN.toml"),
    ],
)
def test_refused_before_any_work(comm, shared_path, monkeypatch, words, said):
    monkeypatch.chdir(shared_path)
    with pytest.raises(ConfigError, match=said):
        step.run(given(*words), comm)
    assert not list(Path(shared_path).iterdir())


@pytest.mark.parallel([1])
def test_numbers_are_finite(comm):
    measured = calibrate.calibrate(group_of(comm), torch.device("cpu"), ["bf16"], SHORT)
    assert "NaN" not in json.dumps(measured)
    assert "Infinity" not in json.dumps(measured)
