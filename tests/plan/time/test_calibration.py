"""Results files and machine files: what is measured comes back as it was, and broken files are refused by key."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpcllm.collectives.cost import COSTS
from hpcllm.errors import ConfigError
from hpcllm.plan.machine import Machine, read_machine
from hpcllm.plan.prediction import predict
from hpcllm.plan.time.calibration import machine_text
from hpcllm.plan.time.kernel_times import CURVES, ORIENTATIONS, Curve, Grid, read_kernel_times

SIZES = [32.0, 512.0]
LINK = {"latency_s": 1e-6, "bandwidth_gb_s": 2.0}
CODING = {"ratio": 1.0, "encode_gb_s": 5.0, "decode_gb_s": 5.0, "add_gb_s": 3.0}
MODEL = "layers=4,hidden=128,heads=4,ffn=352,gated=true,vocab=4096,sequence=128"


def results(scale: float = 1.0) -> dict[str, Any]:
    """Of a machine that is `scale` times as slow as another."""
    kernels = {
        "products": {"sizes": SIZES, **{key: [0.05 / scale] * 8 for key in ORIENTATIONS}},
        "attention": {
            "sequence": [64.0, 256.0],
            "channels": [32.0],
            "forward": [1e-5 * scale, 1e-4 * scale],
            "backward": [2e-5 * scale, 2e-4 * scale],
        },
        "curves": {key: {"sizes": [1e3, 1e6], "seconds": [1e-6 * scale, 1e-3 * scale]} for key in CURVES},
    }
    facts = {"machine": "a host", "date": "today", "library": "an MPI", "ranks": 2, "nodes": 1}
    core = {"call_s": 1e-6, "setup_s": 1e-6, "message_s": 1e-6, "copy_gb_s": 9.0, "memory_gb_s": 5.0}
    tuning = {"measured": facts, "near": LINK, "window": LINK, "core": core}
    tuning |= {"library": dict.fromkeys(COSTS, LINK), "codec": {"raw": {"float32": CODING}}}
    more = {"torch": "2", "ranks_per_node": 2, "threads": 1, "device": "CPU", "kind": "cpu", "memory_gb": 12.5}
    return {"measured": facts | more, "kernels": {"fp32": kernels}, "tuning": tuning}


def machine_of(tables: dict[str, Any], folder: Path) -> Machine:
    (folder / "results.json").write_text(json.dumps(tables), encoding="utf-8")
    (folder / "mine.toml").write_text(machine_text([folder / "results.json"]), encoding="utf-8")
    return read_machine(folder / "mine.toml")


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    machine = machine_of(results(), tmp_path)
    assert machine.device.measured is not None
    assert machine.device.measured.of(2) is None
    times, want = machine.device.measured.of(4), read_kernel_times("kernels", results()["kernels"]["fp32"])
    assert times is not None
    assert (times.products, times.attention, times.curves) == (want.products, want.attention, want.curves)
    assert machine.tuning is not None
    assert machine.tuning.rates.near.bandwidth_gb_s == LINK["bandwidth_gb_s"]
    assert (machine.device.per_node, machine.device.memory_gb) == (2, 12.5)
    assert machine.device.gemm_bf16_tflops == 0.05


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2,micro_batch=2", "dp=2,shard=all,recompute=full"])
def test_slower_kernels_make_slower_steps(layout: str, tmp_path: Path) -> None:
    fast, slow = (
        predict(machine_of(results(scale), tmp_path), MODEL, f"trainer=hpcllm,precision=fp32,{layout}", 8)
        for scale in (1.0, 3.0)
    )
    assert slow.compute_s == pytest.approx(3 * fast.compute_s, rel=1e-3)  # a file has four digits
    assert slow.iteration_time_s > fast.iteration_time_s


def test_links_of_tune_take_the_place_of_the_others(tmp_path: Path) -> None:
    from hpcllm.collectives.tuning import from_tables, to_text

    tables = copy.deepcopy(results())
    machine_of(tables, tmp_path)
    tables["tuning"]["far"] = {"latency_s": 1e-4, "bandwidth_gb_s": 0.125}
    (tmp_path / "tuning.toml").write_text(to_text(from_tables(tables["tuning"])), encoding="utf-8")
    text = machine_text([tmp_path / "results.json", tmp_path / "tuning.toml"])
    (tmp_path / "far.toml").write_text(text, encoding="utf-8")
    far = read_machine(tmp_path / "far.toml")
    assert far.fabric.nic_gb_s == 0.125
    assert far.tuning is not None
    assert far.tuning.rates.far.latency_s == 1e-4


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("measured", "ranks"), 0, r"measured.ranks = 0"),
        (("measured", "date"), 3, r"measured.date = 3 should be a text"),
        (("measured", "memory_gb"), "much", r"measured.memory_gb = 'much'"),
        (("kernels",), {}, r"no precision.*fp32"),
        (("kernels", "fp64"), {}, r"unknown key kernels.fp64.*fp32"),
        (("kernels", "fp32", "curves", "warp"), {}, r"unknown key kernels.fp32.curves.warp"),
        (("kernels", "fp32", "curves", "add", "seconds"), [1.0], r"curves.add has 2 sizes and 1 seconds"),
        (("kernels", "fp32", "curves", "add", "sizes"), [2.0, 1.0], r"curves.add.sizes.*should grow"),
        (("kernels", "fp32", "products", "sizes"), [1.0, "x"], r"products.sizes holds 'x'"),
        (("kernels", "fp32", "products", "input"), [0.1], r"products.input has 1 numbers; valid: 8"),
        (("kernels", "fp32", "attention", "forward"), [-1.0, 1.0], r"attention.forward holds -1.0"),
        (("tuning", "near", "latency_s"), math.inf, r"near.latency_s = inf"),
        (("tuning",), None, r"tuning = 'None' should be a table"),
    ],
)
def test_broken_results_are_refused_by_key(place: tuple[str, ...], value: Any, said: str, tmp_path: Path) -> None:
    tables = results()
    inner = tables
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ConfigError, match=said) as refusal:
        machine_of(tables, tmp_path)
    assert "results.json" in str(refusal.value)


@pytest.mark.parametrize("key", [*ORIENTATIONS, "sizes"])
def test_missing_numbers_are_refused(key: str, tmp_path: Path) -> None:
    tables = results()
    del tables["kernels"]["fp32"]["products"][key]
    with pytest.raises(ConfigError, match=f"products.{key} is missing"):
        machine_of(tables, tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "no", '{"measured": []}', "[" * 100_000])
def test_what_is_no_results_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results of mine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="results of mine"):
        machine_text([path])


@pytest.mark.parametrize("names", [[], ["a.json", "b.json"], ["tuning.toml"]])
def test_one_results_file(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="valid: one"):
        machine_text([Path(name) for name in names])


SECONDS = some.lists(some.floats(1e-7, 1e2), min_size=1, max_size=5)


@given(SECONDS, some.floats(1, 1e9))
def test_a_curve_goes_through_its_points_and_stays_between_them(seconds: list[float], size: float) -> None:
    sizes = tuple(10.0**number for number in range(1, len(seconds) + 1))
    curve = Curve(sizes, tuple(sorted(seconds)))
    for point, value in zip(curve.sizes, curve.seconds, strict=True):
        assert curve.at(point) == pytest.approx(value)
    assert curve.at(2 * size) >= curve.at(size) * (1 - 1e-12)
    assert curve.at(size) >= curve.seconds[0] * (1 - 1e-12)
    assert curve.at(0) == 0


@given(some.lists(some.floats(1e-3, 1e3), min_size=8, max_size=8), some.tuples(*[some.floats(1, 1e5)] * 3))
def test_a_grid_stays_within_what_was_measured(values: list[float], sizes: tuple[float, float, float]) -> None:
    grid = Grid(((32.0, 512.0),) * 3, tuple(values))
    assert min(values) * (1 - 1e-9) <= grid.at(*sizes) <= max(values) * (1 + 1e-9)
    for value, corner in zip(values, itertools.product((32.0, 512.0), repeat=3), strict=True):
        assert grid.at(*corner) == pytest.approx(value)


def test_a_small_product_takes_as_long_as_the_smallest_that_was_measured() -> None:
    times = read_kernel_times("kernels", results()["kernels"]["fp32"])
    assert times.product_s("forward", 1, 1, 1) == times.product_s("forward", 32, 32, 32)
    assert times.product_s("weight", 2048, 512, 512) == pytest.approx(4 * times.product_s("weight", 512, 512, 512))
    assert times.attention_s("forward", 1, 1024, 32) == pytest.approx(16 * times.attention_s("forward", 1, 256, 32))
