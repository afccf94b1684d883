"""What a machine file says reaches the planner; what it leaves out is filled in and named; nonsense is refused."""

from __future__ import annotations

import dataclasses

import pytest

from hpcllm.config import machines
from hpcllm.errors import ConfigError
from hpcllm.plan.machine import read_machine

NAMES = [name for name in machines.names() if "device" in machines.load(name)]
LEAST = """
[device]
name = "GPU"
per_node = 4
memory_gb = 80
hbm_gb_s = 2000
peak_bf16_tflops = 300
[network]
nics_per_node = 2
nic_gb_s = 25
"""


def written(tmp_path, text: str) -> str:
    path = tmp_path / "my machine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_file_are_those_of_the_planner(name):
    machine, tables = read_machine(name), machines.load(name)
    for part, title in ((machine.device, "device"), (machine.links, "links"), (machine.power, "power")):
        for key, value in dataclasses.asdict(part).items():
            if key in tables[title]:
                assert value == tables[title][key], key
    assert machine.fabric.node_gb_s == tables["network"]["nics_per_node"] * tables["network"]["nic_gb_s"]
    assert machine.device.has_bf16 == ("peak_bf16_tflops" in tables["device"])
    assert {note.partition(" ")[0] for note in machine.assumed} <= {
        "device.gemm_bf16_tflops",
        "network.loss_per_doubling",
    }


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_in_proportion(name):
    """What no machine can be: a swapped unit shows here."""
    device, fabric, power = read_machine(name).device, read_machine(name).fabric, read_machine(name).power
    assert 15 < device.hbm_gb_s / device.memory_gb < 100  # times a second that all of it can be read
    assert 0.3 < device.gemm_bf16_tflops / device.peak_bf16_tflops < 0.95
    assert 1e-6 <= fabric.latency_s < 1e-4
    assert 0.9 * device.per_node * power.device_w < power.node_w < 4 * device.per_node * power.device_w


def test_a_file_that_says_little_is_filled_in_and_says_so(tmp_path):
    machine = read_machine(written(tmp_path, LEAST))
    assert machine.name == "a machine without a name"
    assert "device.usable_memory_gib = 78.8" in machine.assumed
    assert "network.collective_share = 0.8" in machine.assumed
    assert machine.links.collective_gb_s < machine.links.device_gb_s


def test_what_was_said_is_not_assumed(tmp_path):
    machine = read_machine(written(tmp_path, LEAST + "collective_share = 0.5\n"))
    assert machine.fabric.collective_share == 0.5
    assert not any("collective_share" in note for note in machine.assumed)


def test_a_machine_is_taken_as_it_is():
    machine = read_machine("frontier")
    assert read_machine(machine) is machine


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gb_s = 2000", "", r"device\.hbm_gb_s = None; valid: a number above 0"),
        ("hbm_gb_s = 2000", "hbm_gb_s = -1", r"device\.hbm_gb_s = -1"),
        ("hbm_gb_s = 2000", "hbm_gb_s = nan", r"device\.hbm_gb_s = nan"),
        ("hbm_gb_s = 2000", "hbm_gb_s = true", r"device\.hbm_gb_s = True"),
        ("per_node = 4", "per_node = 2.5", r"device\.per_node = 2\.5; valid: a whole number"),
        ("peak_bf16_tflops = 300", "", r"device\.peak_bf16_tflops = None"),
        ('name = "GPU"', "name = 3", r"device\.name = 3; valid: a name"),
        ("nic_gb_s = 25", "nic_gbs = 25", r"network has no key 'nic_gbs'.*nic_gb_s"),
        ("nic_gb_s = 25", "nic_gb_s = 25\nmpi_share = 1.5", r"network\.mpi_share = 1\.5; valid: .*up to 1"),
        ("[network]", "links = 3\n[network]", r"device has no key 'links'"),
        ("nic_gb_s = 25", "nic_gb_s = 25\n[power]\nnode_w = 'much'", r"power\.node_w = 'much'"),
    ],
)
def test_a_file_with_nonsense_is_refused_by_name_key_and_value(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=r"my machine\.toml.*" + message):
        read_machine(written(tmp_path, LEAST.replace(old, new)))


def test_a_machine_without_devices_is_refused():
    with pytest.raises(ConfigError, match=r"'lumi-c' has no \[device\]"):
        read_machine("lumi-c")
