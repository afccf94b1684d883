"""Every machine of the folder can be used, and a user's own file is refused with its name if it cannot."""

from __future__ import annotations

import re

import pytest

from hpcllm import machines
from hpcllm.errors import ConfigError


@pytest.mark.parametrize("name", machines.names())
def test_every_machine_has_a_name_and_a_peak_that_grows_with_the_threads(name):
    assert machines.load(name)["cpu"]["name"]
    one = machines.peak_tflops(name, 1)
    assert one > 0
    for threads in (2, 7, 64):
        assert machines.peak_tflops(name, threads) == pytest.approx(threads * one)


SCHEMA = {
    "cpu": {"name": str, "cores_per_node": int, "peak_fp32_gflops_per_core": float},
    "device": {"name": str, "per_node": int, "memory_gb": float, "hbm_gb_s": float, "peak_bf16_tflops": float},
    "network": {"nic": str, "nics_per_node": int, "nic_gb_s": float},
}
OPTIONAL = {"device": {"per_package": int, "gemm_bf16_tflops": float, "near_cores": list}}


@pytest.mark.parametrize("name", machines.names())
def test_every_machine_keeps_to_the_schema(name):
    machine = machines.load(name)
    assert isinstance(machine.pop("name"), str)
    assert {"cpu", "network"} <= machine.keys() <= SCHEMA.keys()  # a machine without devices has no [device]
    for table, values in machine.items():
        kinds = {**SCHEMA[table], **OPTIONAL.get(table, {})}
        assert SCHEMA[table].keys() <= values.keys() <= kinds.keys(), table
        for key, value in values.items():
            assert type(value) is kinds[key], (table, key)
            assert kinds[key] in (str, list) or value > 0, (table, key)


@pytest.mark.parametrize("name", machines.names())
def test_every_number_stands_beside_its_source(name):
    """A source [1] of the head of the file, or how the number comes about."""
    text = (machines.FOLDER / f"{name}.toml").read_text()
    known = set(re.findall(r"\[\d\]", text.split("\nname =")[0]))
    for table in text.split("\n[")[1:]:
        for line in table.splitlines():
            if "device" in machines.load(name) and re.match(r"\w+ = [\d.]+", line):
                comment = line.partition("#")[2]
                assert "FLOPs a cycle" in comment or set(re.findall(r"\[\d\]", comment)) & known, line


def cores_of(text: str) -> range:
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def with_devices() -> list[str]:
    return [name for name in machines.names() if "device" in machines.load(name)]


@pytest.mark.parametrize("name", with_devices())
def test_a_device_is_faster_on_paper_than_in_practice(name):
    device = machines.load(name)["device"]
    assert device.get("gemm_bf16_tflops", 0.0) < device["peak_bf16_tflops"]
    assert machines.peak_tflops(name, 7, on_device=True) == device["peak_bf16_tflops"]
    assert machines.peak_tflops(name, 1) < machines.peak_tflops(name, 1, on_device=True)


@pytest.mark.parametrize("name", [name for name in with_devices() if "near_cores" in machines.load(name)["device"]])
def test_cores_near_a_device_are_near_no_other(name):
    machine = machines.load(name)
    cores = [core for text in machine["device"]["near_cores"] for core in cores_of(text)]
    assert len(machine["device"]["near_cores"]) == machine["device"]["per_node"]
    assert len(set(cores)) == len(cores)
    assert set(cores) <= set(range(machine["cpu"]["cores_per_node"]))


def test_a_machine_without_devices_has_no_peak_of_one():
    with pytest.raises(ConfigError, match=r"'lumi-c' has no number device\.peak_bf16_tflops"):
        machines.peak_tflops("lumi-c", 1, on_device=True)


def test_no_machine_no_peak():
    assert machines.peak_tflops("", 4) is None
    assert machines.peak_tflops("", 4, on_device=True) is None


def test_a_file_of_the_user_is_taken_by_its_path(tmp_path):
    path = tmp_path / "my laptop.toml"
    path.write_text("[cpu]\npeak_fp32_gflops_per_core = 50\n")
    assert machines.peak_tflops(str(path), 2) == pytest.approx(0.1)


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"run\.machine = 'fronteer'.*lumi-c"):
        machines.peak_tflops("fronteer", 1)


@pytest.mark.parametrize(
    "text", ["", "[cpu]\n", "cpu = 3\n", '[cpu]\npeak_fp32_gflops_per_core = "fast"\n', "[cpu\n", "\xff"]
)
def test_a_file_without_a_peak_is_refused_by_name(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.machine = '.*mine\.toml'"):
        machines.peak_tflops(str(path), 1)
