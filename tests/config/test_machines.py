"""Every machine of the folder can be used, and a user's own file is refused with its name if it cannot."""

from __future__ import annotations

import re

import pytest

from hpcllm.config import machines
from hpcllm.config.machines import RANGES, WHOLE
from hpcllm.errors import ConfigError
from hpcllm.plan.time.roofline import FAMILIES


def with_cpus() -> list[str]:
    return [name for name in machines.names() if "cpu" in machines.load(name)]


def with_devices() -> list[str]:
    return [name for name in machines.names() if "device" in machines.load(name)]


def with_bf16() -> list[str]:
    return [name for name in with_devices() if "peak_bf16_tflops" in machines.load(name)["device"]]


@pytest.mark.parametrize("name", with_cpus())
def test_every_machine_has_a_name_and_a_peak_that_grows_with_the_threads(name):
    assert machines.load(name)["cpu"]["name"]
    one = machines.peak_tflops(name, 1)
    assert one > 0
    for threads in (2, 7, 64):
        assert machines.peak_tflops(name, threads) == pytest.approx(threads * one)


def test_the_known_machines_are_all_here():
    """Those of the published runs that the planner is compared with."""
    published = """
        alps aurora aws-p4d crusher dgx-a100 dgx-a100-80gb-hdr dgx-h100 dgx2-v100 el-capitan eos frontier glm-a100-40gb
        jean-zay-a100 jupiter lassen leonardo lumi-g marenostrum5-acc megascale-ampere meta-a100-80gb meta-h100
        mosaic-a100-40gb mosaic-a100-80gb mosaic-h100 neox-a100-40gb perlmutter perlmutter-80 polaris selene summit
        tpuv4-2pods
    """
    assert set(published.split()) == set(with_devices())


SCHEMA = {
    "cpu": {"name": str, "cores_per_node": int, "peak_fp32_gflops_per_core": float},
    "device": {"name": str, "per_node": int, "memory_gb": float, "hbm_gb_s": float},
    "links": {"kind": str, "pair_gb_s": float, "device_gb_s": float, "message_share": float, "collective_gb_s": float},
    "network": {"nic": str, "nics_per_node": int, "nic_gb_s": float},
    "power": {"node_w": int, "device_w": int},
}
OPTIONAL = {
    "device": {
        **dict.fromkeys(("per_package", "multiprocessors"), int),
        **dict.fromkeys(("peak_bf16_tflops", "peak_fp16_tflops", "gemm_bf16_tflops"), float),
        "family": str,
        "cache_mb": float,
        "usable_memory_gib": float,
        "near_cores": list,
    },
    "links": {"package_gb_s": float, "latency_s": float},
    "network": {
        **dict.fromkeys(("latency_s", "mpi_share", "message_share", "collective_share", "loss_per_doubling"), float),
        "topology": str,
        "group_nodes": int,
        "group_taper": float,
    },
}


@pytest.mark.parametrize("name", machines.names())
def test_every_machine_keeps_to_the_schema(name):
    machine = machines.load(name)
    assert isinstance(machine.pop("name"), str)
    assert machine.pop("nodes", 1) > 0
    needed = {"device", "links", "network", "power"} if "device" in machine else {"cpu", "network"}
    assert needed <= machine.keys() <= SCHEMA.keys()  # a machine without devices has no [device]
    for table, values in machine.items():
        kinds = {**SCHEMA[table], **OPTIONAL.get(table, {})}
        assert SCHEMA[table].keys() <= values.keys() <= kinds.keys(), table
        for key, value in values.items():
            assert type(value) is kinds[key], (table, key)
            assert kinds[key] in (str, list) or value > 0 or key == "loss_per_doubling", (table, key)
    if "device" in machine:
        assert machine["device"]["family"] in FAMILIES
        assert 0.7 < machine["device"]["usable_memory_gib"] / machine["device"]["memory_gb"] <= 1


@pytest.mark.parametrize("name", machines.names())
def test_every_number_stands_beside_its_source(name):
    """A source [1] of the head of the file, or how the number comes about."""
    text = (machines.FOLDER / f"{name}.toml").read_text()
    known = set(re.findall(r"\[\d\]", text.split("\nname =")[0]))
    for line in text.split("\nname =")[1].splitlines():
        if "device" in machines.load(name) and re.match(r"\w+ = [\d.]+", line):
            comment = line.partition("#")[2]
            named = set(re.findall(r"\[\d\]", comment))
            assert named <= known, line
            assert named or "FLOPs a cycle" in comment, line


def test_what_a_file_does_not_say_is_as_in_the_machine_that_it_is_like(tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text('name = "Mine"\nlike = "frontier"\n[network]\nnic_gb_s = 50.0\n')
    mine, frontier = machines.load(str(own)), machines.load("frontier")
    assert mine["name"] == "Mine"
    assert mine["network"] == {**frontier["network"], "nic_gb_s": 50.0}
    assert mine["device"] == {key: value for key, value in frontier["device"].items() if key != "near_cores"}
    assert "cpu" not in mine
    assert "nodes" not in mine


@pytest.mark.parametrize("base", ['"fronteer"', '"crusher"', "3", '["frontier"]'])
def test_a_machine_is_like_a_known_one_that_stands_by_itself(tmp_path, base):
    own = tmp_path / "mine.toml"
    own.write_text(f"like = {base}\n")
    with pytest.raises(ConfigError, match=r"mine\.toml.*like = .* valid: alps, "):
        machines.load(str(own))


def cores_of(text: str) -> range:
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


@pytest.mark.parametrize("name", with_bf16())
def test_a_device_is_faster_on_paper_than_in_practice(name):
    device = machines.load(name)["device"]
    assert device.get("gemm_bf16_tflops", 0.0) < device["peak_bf16_tflops"]
    assert machines.peak_tflops(name, 7, on_device=True) == device["peak_bf16_tflops"]
    if name in with_cpus():
        assert machines.peak_tflops(name, 1) < machines.peak_tflops(name, 1, on_device=True)


@pytest.mark.parametrize("name", with_devices())
def test_a_network_is_faster_on_paper_than_in_practice(name):
    links, network = machines.load(name)["links"], machines.load(name)["network"]
    assert links["pair_gb_s"] <= links.get("package_gb_s", links["pair_gb_s"]) <= links["device_gb_s"]
    assert links["collective_gb_s"] <= links["device_gb_s"]
    assert all(network[key] <= 1 for key in ("mpi_share", "message_share", "collective_share"))
    assert network.get("group_taper", 1.0) <= 1


def test_a_device_without_bf16_has_no_peak_in_it():
    with pytest.raises(ConfigError, match=r"'summit' has no number device\.peak_bf16_tflops"):
        machines.peak_tflops("summit", 1, on_device=True)


def test_a_machine_whose_cores_nobody_knows_has_no_peak_of_them():
    with pytest.raises(ConfigError, match=r"'mosaic-h100' has no number cpu\.peak_fp32_gflops_per_core"):
        machines.peak_tflops("mosaic-h100", 1)


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
    with pytest.raises(ConfigError, match=r"machine 'fronteer'.*lumi-c"):
        machines.peak_tflops("fronteer", 1)


@pytest.mark.parametrize(
    "text", ["", "[cpu]\n", "cpu = 3\n", '[cpu]\npeak_fp32_gflops_per_core = "fast"\n', "[cpu\n", "\xff"]
)
def test_a_file_without_a_peak_is_refused_by_name(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"machine (= )?'.*mine\.toml'"):
        machines.peak_tflops(str(path), 1)


NUMBERS = [(table, key) for table, keys in RANGES.items() for key in keys]
OUT_OF_RANGE = [
    "-1",
    "-0.5",
    "1" + "0" * 400,
    "9223372036854775808",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "true",
    '"4"',
    "[4]",
]


@pytest.mark.parametrize(("table", "key"), NUMBERS)
def test_a_number_that_no_machine_has_is_refused_with_its_range(tmp_path, table, key):
    own = tmp_path / "own.toml"
    for value in [*OUT_OF_RANGE, *(["0"] if 0 not in RANGES[table][key] else []), *(["1.5"] if key in WHOLE else [])]:
        own.write_text(f'name = "own"\n[{table}]\n{key} = {value}\n')
        with pytest.raises(ConfigError, match=rf"own\.toml.*{table}\.{key} = .*valid: a (whole )?number, ") as refused:
            machines.load(str(own))
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "line", ["nodes = 0", "nodes = -4", "nodes = 1.5", 'name = "\\u001b[2J"', "name = 3", "links = 3"]
)
def test_the_head_of_a_file_is_checked_too(tmp_path, line):
    (tmp_path / "own.toml").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=line.split()[0]):
        machines.load(str(tmp_path / "own.toml"))
