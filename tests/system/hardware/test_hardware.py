"""What the kernel's small files say, of machines that are not at hand and of this one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_nodes import MI250X, link, mi250x_node, write

from hpcllm.system.hardware.node import (
    allowed_cores,
    busy_s,
    cpu_quota,
    find_free_memory,
    find_hardware,
    find_memory,
    memory_limit,
    multiplies,
    node_name,
)
from hpcllm.system.hardware.pci_devices import find_gpus, find_nics, numa_of_pci, wire_gb_s
from hpcllm.system.hardware.sysfs import Root, list_text, mask_text, numbers, runs
from hpcllm.system.hardware.topology import find_topology
from hpcllm.system.slurm import nodes_text


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cores_reads_back_as_it_was(cores):
    text = list_text(cores)
    assert numbers(text) == tuple(sorted(cores))
    assert len(text.split(",")) == max(1, len(list(runs(cores))))
    assert int(mask_text(cores), 16).bit_count() == len(cores)
    assert all(int(mask_text(cores), 16) >> core & 1 for core in cores)


@pytest.mark.parametrize("text", ["", "a", "1-", "1-b", "-3", "0x3", "1;2"])
def test_what_is_no_list_of_cores_is_none(text):
    assert numbers(text) == ()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n1", "n3"], "n[1,3]"),
        (["nid001", "nid002", "nid010"], "nid[001-002,010]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n07", "n7"], "n07,n7"),
        (["n0", "n1"], "n[0-1]"),
        (["n09", "n10", "n100"], "n[09-10],n100"),
        (["login"], "login"),
        (["a", "b2", "b3"], "a,b[2-3]"),
        ([], ""),
    ],
)
def test_names_of_nodes_are_as_slurm_takes_them(names, text):
    assert nodes_text(names) == text


def test_many_names_are_cut():
    assert nodes_text(["login", "login1", "login2"]) == "login,login[1-2]"
    assert nodes_text([f"n{i}" for i in range(9999)], 3) == "n[0-2], ... (9999 nodes)"


def test_a_node_of_mi250x(tmp_path):
    root = mi250x_node(tmp_path / "a node")
    hardware = find_hardware(root)
    topology = hardware.topology
    assert len(topology.cores) == 128
    assert topology.physical(topology.numbers) == tuple(range(64))
    assert topology.first_threads((1, 65, 66)) == (1, 66)
    assert topology.domains_of((15, 80)) == (0, 1)
    assert topology.distance(0, 0) == 10
    assert topology.distance(3, 1) == 12
    assert {core.cache for core in topology.cores} == set(range(0, 64, 8))
    assert {gpu.pci: gpu.numa for gpu in hardware.gpus} == {pci: numa for numa, both in MI250X.items() for pci in both}
    assert {gpu.vendor for gpu in hardware.gpus} == {"amd"}
    assert [(nic.name, nic.kind, nic.numa, nic.rate_gb_s, nic.up) for nic in hardware.nics] == [
        (f"cxi{domain}", "slingshot", domain, 25.0, True) for domain in range(4)
    ]
    assert wire_gb_s(hardware.nics) == 100.0
    assert hardware.processor.startswith("AMD EPYC 7A53")
    assert hardware.memory.total_bytes == 536000000 * 1024
    assert numa_of_pci("0000:D1:00.0", root) == 0


def test_infiniband_counts_once_and_says_when_it_is_down(tmp_path):
    root = write(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (2X HDR)",
            "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
            "sys/class/net/ib0/speed": "100000",
            "sys/class/net/eth0/speed": "-1",
            "sys/class/net/eth0/operstate": "up",
            "sys/bus/pci/devices/0000:05:00.0/numa_node": "-1",
        },
    )
    link(tmp_path, "sys/class/infiniband/mlx5_0/device", "sys/bus/pci/devices/0000:05:00.0")
    link(tmp_path, "sys/class/net/ib0/device", "sys/bus/pci/devices/0000:05:00.0")
    link(tmp_path, "sys/class/net/eth0/device", "sys/bus/pci/devices/0000:06:00.0")
    card, ethernet = find_nics(root)
    assert (card.name, card.kind, card.rate_gb_s, card.up, card.numa) == ("mlx5_0", "infiniband", 12.5, False, None)
    assert (ethernet.name, ethernet.rate_gb_s, ethernet.up) == ("eth0", None, True)
    assert wire_gb_s((card, ethernet)) is None
    management, slow = replace(ethernet, rate_gb_s=0.125), replace(ethernet, rate_gb_s=0.0125)
    assert wire_gb_s((slow, card, management)) == 0.125
    assert wire_gb_s((slow, replace(card, up=True), management)) == 12.5


def test_displays_and_laptop_graphics_are_no_gpus(tmp_path):
    pci = "sys/bus/pci/devices"
    cards = {
        "0000:00:02.0": ("0x8086", "0x030000", "0x9a49"),  # Intel's graphics of a laptop
        "0000:01:00.0": ("0x1a03", "0x030000", "0x2000"),  # ASPEED, of a server's main board
        "0000:18:00.0": ("0x8086", "0x038000", "0x0bd5"),  # Data Center GPU Max
        "0000:41:00.0": ("0x10de", "0x030200", "0x20b0"),  # A100
    }
    for number, (address, (vendor, kind, device)) in enumerate(cards.items()):
        folder = f"{pci}/{address}"
        write(tmp_path, {f"{folder}/vendor": vendor, f"{folder}/class": kind, f"{folder}/device": device})
        link(tmp_path, f"sys/class/drm/card{number}/device", folder)
    found = find_gpus(Root(tmp_path))
    assert [(gpu.vendor, gpu.pci) for gpu in found] == [("intel", "0000:18:00.0"), ("nvidia", "0000:41:00.0")]


def test_nvidia_s_driver_is_believed_without_a_card(tmp_path):
    root = write(tmp_path, {"proc/driver/nvidia/gpus/0000:03:00.0/information": "Model: NVIDIA H100"})
    assert [gpu.pci for gpu in find_gpus(root)] == ["0000:03:00.0"]


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_a_group_and_those_above_it_holds(tmp_path, version):
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/job_7/step_0",
            "sys/fs/cgroup/job_7/memory.max": "1000000",
            "sys/fs/cgroup/job_7/step_0/memory.max": "max",
            "sys/fs/cgroup/job_7/cpu.max": "150000 100000",
        }
    else:
        files = {
            "proc/self/cgroup": "5:memory:/job_7/step_0\n3:cpu,cpuacct:/job_7",
            "sys/fs/cgroup/memory/job_7/memory.limit_in_bytes": "1000000",
            "sys/fs/cgroup/memory/job_7/step_0/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/cpu/job_7/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/job_7/cpu.cfs_period_us": "100000",
        }
    root = write(tmp_path, files | {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 2048 kB"})
    assert memory_limit(root) == 1000000
    assert find_memory(root).usable_bytes == 1000000
    assert cpu_quota(root) == 1.5


def test_an_empty_machine_has_no_error(tmp_path):
    hardware = find_hardware(Root(tmp_path / "nothing here"))
    assert len(hardware.topology.cores) == os.cpu_count()
    assert (hardware.gpus, hardware.nics, hardware.quota_cores) == ((), (), None)
    assert find_free_memory(Root(tmp_path)).available_bytes == 0


@pytest.mark.skipif(not os.path.isdir("/sys/devices/system/cpu"), reason="Linux only")
def test_this_machine_is_seen_as_python_sees_it():
    topology = find_topology()
    assert set(allowed_cores()) <= set(topology.numbers)
    assert len(topology.numbers) <= (os.cpu_count() or 1)
    memory, room = find_memory(), find_free_memory()
    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < room.available_bytes <= memory.total_bytes
    assert busy_s(topology.numbers) > 0
    assert node_name()
    assert "." not in node_name()


@pytest.mark.parametrize(
    ("cpuinfo", "words"),
    [
        ("flags\t\t: fpu avx2 f16c", {"fp32"}),  # F16C converts, and multiplies nothing
        ("flags\t\t: fpu avx512f avx512_bf16", {"fp32", "bf16"}),
        ("flags\t\t: amx_bf16 avx512_fp16 amx_tile", {"fp32", "bf16", "fp16"}),
        ("Features\t: fp asimd fphp asimdhp bf16", {"fp32", "bf16", "fp16"}),  # of Arm
        ("processor\t: 0", {"fp32", "bf16", "fp16"}),  # nobody knows: no warning
    ],
)
def test_what_the_cores_multiply_is_known_by_the_words_of_the_kernel(tmp_path, cpuinfo, words):
    root = write(tmp_path, {"proc/cpuinfo": f"model name\t: some CPU\n{cpuinfo}"})
    assert {dtype for dtype in ("fp32", "bf16", "fp16") if multiplies(dtype, root)} == words


def test_only_the_cores_that_are_asked_for_count_as_busy(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu 0 0\ncpu0 10 5 5 900 70 3 2 0 9 9\ncpu1 100 0 0 7\ncpu10 1 0 0 0\nintr\n")
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_s([0], Root(tmp_path)) == pytest.approx(25 * tick_s)
    assert busy_s([0, 1], Root(tmp_path)) == pytest.approx(125 * tick_s)
    assert busy_s([7], Root(tmp_path)) == 0
