"""A rank's device: which one it is, what is said where there is none, and what a device could do at best."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from hpcllm.config import schema as configs
from hpcllm.config.machines import load, names, peak_of_device
from hpcllm.errors import ConfigError
from hpcllm.optim.replica_check import checksums
from hpcllm.system import device as devices
from hpcllm.system.device import (
    DeviceFacts,
    choose_device,
    compute_on_own_stream,
    device_facts,
    device_identity,
    device_index,
    local_rank,
    no_device_reason,
    peak_tflops_of_rank,
    synchronize,
    take_device,
)

MI250X = DeviceFacts("cuda", 0, "AMD Instinct MI250X", 64 * 10**9, "0000:c1:00.0")


@pytest.mark.parametrize("visible", [1, 2, 4, 8])
def test_ranks_of_a_node_take_its_devices_in_turn(visible):
    """As many ranks as devices: each its own; more: all devices get as many as each other, give or take one."""
    for ranks in (visible, 2 * visible, 2 * visible + 1):
        taken = [device_index("auto", visible, rank, "") for rank in range(ranks)]
        counts = np.bincount(taken, minlength=visible)
        assert counts.max() - counts.min() <= 1
        assert taken[:visible] == list(range(visible))
        assert taken == [device_index("gpu", visible, rank, "") for rank in range(ranks)]


@pytest.mark.parametrize(
    ("told", "place_on_node"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "5"}, 5),
        ({"SLURM_LOCALID": "0"}, 2),  # of a batch script, in which somebody else starts ranks
        ({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "6"}, 6),
        ({"PMI_SIZE": "8", "PALS_LOCAL_RANKID": "7"}, 7),
        ({"PMI_SIZE": "8"}, 2),
        ({}, 2),
    ],
)
def test_a_rank_takes_the_device_of_its_launchers_place(monkeypatch, told, place_on_node):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PALS_", "HYDI_")):
            monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert local_rank(2) == place_on_node


def test_the_cpu_where_it_is_wished_or_nothing_else_is_there():
    assert device_index("cpu", 8, 3, "") is None
    assert device_index("auto", 0, 3, "none is visible") is None
    with pytest.raises(ConfigError, match="is 'gpu', but none is visible; or 'cpu', or 'auto'"):
        device_index("gpu", 0, 3, "none is visible")


def test_whoever_wants_a_gpu_and_has_none_is_told_why(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"PyTorch {torch.__version__.replace('+', '.')} on .* sees none"):
        choose_device("gpu")
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for version in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, version, None, raising=False)
    assert "built for CPUs alone; valid: a PyTorch for CUDA, ROCm or XPU" in no_device_reason({})
    monkeypatch.setattr(torch.version, "hip", "6.4")
    told = no_device_reason({"ROCR_VISIBLE_DEVICES": "", "HOME": "/root"})
    assert "with ROCR_VISIBLE_DEVICES=''" in told
    assert "--gpus-per-node" in told
    assert "HOME" not in told


def test_two_ranks_share_a_device_only_if_it_is_the_same():
    other = DeviceFacts("cuda", 0, "AMD Instinct MI250X", 64 * 10**9, "0000:c6:00.0")
    assert device_identity(MI250X, {}) == device_identity(MI250X, {"ROCR_VISIBLE_DEVICES": "4"})  # the bus knows best
    assert device_identity(MI250X, {}) != device_identity(other, {})
    nameless = DeviceFacts("cuda", 0, "GPU", 0, "")
    assert device_identity(nameless, {"ROCR_VISIBLE_DEVICES": "4"}) != device_identity(
        nameless, {"ROCR_VISIBLE_DEVICES": "5"}
    )
    assert device_identity(nameless, {}) != device_identity(DeviceFacts("cuda", 1, "GPU", 0, ""), {})


class Properties:
    def __init__(self, **known) -> None:
        self.__dict__.update(known)


def test_an_address_is_that_of_the_bus_if_it_is_known():
    bus = {"pci_domain_id": 1, "pci_bus_id": 0xC1, "pci_device_id": 0}
    assert devices._address(Properties(**bus)) == "0001:c1:00.0"
    assert devices._address(Properties(pci_bus_id=0xC1)) == "0000:c1:00.0"
    assert devices._address(Properties(uuid="b3")) == "b3"
    assert devices._address(None) == ""
    assert MI250X.text == "AMD Instinct MI250X (64 GB)"


def config_of(compute: str, machine: str = ""):
    return configs.from_tables({"run": {"machine": machine}, "precision": {"compute": compute}})


def test_what_a_device_could_do_is_known_by_machine_or_name_for_16_bits_only():
    for compute in ("bf16", "fp16"):
        assert peak_tflops_of_rank(config_of(compute), MI250X, 7) == 191.5  # of a GCD
        assert peak_tflops_of_rank(config_of(compute), DeviceFacts("cuda", 0, "GeForce", 0, ""), 7) is None
    assert peak_tflops_of_rank(config_of("fp32"), MI250X, 7) is None
    assert peak_tflops_of_rank(config_of("bf16", "lumi-c"), device_facts(torch.device("cpu")), 2) == pytest.approx(
        2 * 0.0784
    )
    with pytest.raises(ConfigError, match=r"'lumi-c' has no number device\.peak_bf16_tflops"):
        peak_tflops_of_rank(config_of("fp32", "lumi-c"), MI250X, 7)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("AMD Instinct MI300A", 980.6),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_the_peak_by_a_drivers_name(name, peak):
    assert peak_of_device(name) == peak


@pytest.mark.parametrize("name", [name for name in names() if "device" in load(name)])
def test_a_machine_and_the_name_of_its_device_say_the_same(name):
    device = load(name)["device"]
    assert peak_of_device(device["name"]) in (None, device.get("peak_bf16_tflops"))


@pytest.mark.parallel([1, 2, 3])
def test_on_cpus_nobody_shares(comm):
    taken = take_device("cpu", comm, comm)
    assert (taken.device, taken.ranks) == (torch.device("cpu"), 1)


@pytest.mark.parallel([2, 3])
def test_a_node_without_devices_among_others_is_named_by_all(comm, monkeypatch):
    if comm.rank == comm.size - 1:  # on the other ranks there is one, as far as it goes
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    else:
        monkeypatch.setattr(devices, "choose_device", lambda *_: torch.device("meta"))
        monkeypatch.setattr(devices, "device_facts", lambda _: MI250X)
    with pytest.raises(
        ConfigError, match=rf"1 of {comm.size} ranks failed: rank {comm.size - 1}: .* leave this node out"
    ):
        take_device("auto", comm, comm)


@pytest.mark.pretend
@pytest.mark.parallel([1, 2, 3])
def test_ranks_on_one_device_are_counted(comm):
    taken = take_device("auto", comm, comm)
    assert (taken.device.type, taken.ranks) == ("pretend", comm.size)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
def test_a_run_may_do_without_one_order_of_sums_and_the_next_one_asks_for_it_again(comm):
    for deterministic in (True, False, True):
        take_device("auto", comm, comm, deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.pretend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 0), (70,)])
def test_a_checksum_sees_every_bit_and_every_place(dtype, shape, monkeypatch):
    monkeypatch.setattr("hpcllm.optim.replica_check.CHUNK", 8)
    values = torch.randn(shape).to(dtype)
    want = checksums([values.to("pretend"), values.to("pretend")])
    assert want[0] == want[1]
    assert len(checksums([])) == 0
    bits = values.view(torch.uint8).flatten()
    changed = []
    for at in range(bits.numel()):
        for bit in range(8):
            bits[at] ^= 1 << bit
            changed.append(checksums([values.to("pretend")])[0])
            bits[at] ^= 1 << bit
    assert want[0] not in changed
    assert len(set(changed)) == len(changed)


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
def test_what_is_told_on_a_stream_of_its_own_comes_after_what_was_told_before():
    """The fixture no_races asks for the order."""
    device = torch.device("pretend", 0)
    before = torch.accelerator.current_stream(device)
    try:
        torch.accelerator.set_stream(torch.Stream(device))
        x = torch.ones(100, device=device)
        compute_on_own_stream(device)
        assert (x + 1).cpu().tolist() == [2.0] * 100
        before.wait_stream(torch.accelerator.current_stream(device))
    finally:
        torch.accelerator.set_stream(before)


@pytest.mark.pretend
@pytest.mark.parallel([1, 2])
def test_whatever_any_stream_was_told_is_done_once_the_device_is_waited_for():
    device, home = torch.device("pretend", 0), torch.empty(100, pin_memory=True)
    with torch.Stream(device):
        home.copy_(torch.ones(100, device=device), non_blocking=True)
    synchronize(device)
    assert home.tolist() == [1.0] * 100  # on its way it would be poison
