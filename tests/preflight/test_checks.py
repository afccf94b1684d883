"""Each fault is found, named and fixed, and a sound allocation has none."""

from __future__ import annotations

import dataclasses

import pytest
from made_up_allocations import (
    GB,
    GCD_CORES,
    WHEEL,
    frontier,
    laptop,
    perlmutter,
    with_gauges,
    with_hardware,
    with_ranks,
    with_variable,
)

from hpcllm.preflight import checks
from hpcllm.preflight.checks import check
from hpcllm.preflight.facts import Allocation, RankFacts
from hpcllm.preflight.findings import Finding
from hpcllm.system.hardware.node import Memory
from hpcllm.system.hardware.sysfs import numbers


def the_one(allocation: Allocation, words: str, severity: str) -> Finding:
    """The finding that has these words, of that severity."""
    found = [finding for finding in check(allocation) if words in finding.what]
    assert len(found) == 1, check(allocation)
    assert found[0].severity == severity
    assert found[0].where
    assert found[0].fix
    return found[0]


def replaced(**changes):
    return lambda _, rank: dataclasses.replace(rank, **changes)


@pytest.mark.parametrize(
    "allocation",
    [frontier(), frontier(64), perlmutter(3), laptop(1), laptop(2), laptop(4)],
    ids=lambda a: a.nodes[0].name,
)
def test_a_sound_allocation_has_no_finding(allocation):
    assert check(allocation) == []


def test_two_ranks_on_one_core():
    allocation = with_ranks(laptop(2), lambda _, rank: dataclasses.replace(rank, cores=(1,)))
    found = the_one(allocation, "2 ranks share 1 core (1)", "slow")
    assert found.where == "ranks 0-1 on laptop"
    assert found.fix == "mpiexec -bind-to core:2"


def test_two_threads_of_one_core_are_one_core():
    masks = [(3,), (67,), (4,), (5,)]
    allocation = with_ranks(
        perlmutter(1), lambda place, rank: dataclasses.replace(rank, cores=masks[place], device=None)
    )
    assert the_one(allocation, "2 ranks share 1 core (3)", "slow").where == "ranks 0-1 on nid00"


def test_more_ranks_than_cores_are_found_once_and_sent_to_more_nodes():
    found = the_one(laptop(9, 4), "9 ranks share 4 cores (0-3)", "slow")
    assert found.fix == "start 4 ranks a node: mpiexec -n 4, or on more nodes -ppn 4"


def test_three_ranks_in_a_part_of_the_cores_are_found_although_the_whole_has_room():
    masks = {0: (0, 1), 1: (0, 1), 2: (1, 0), 3: (0, 1, 2, 3)}
    allocation = with_ranks(laptop(4), lambda place, rank: dataclasses.replace(rank, cores=tuple(sorted(masks[place]))))
    assert the_one(allocation, "3 ranks share 2 cores (0-1)", "slow").where == "ranks 0-2 on laptop"


def test_cores_in_common_by_mistake():
    masks = [(0, 1, 2), (2, 3)]
    allocation = with_ranks(laptop(2), lambda place, rank: dataclasses.replace(rank, cores=masks[place]))
    the_one(allocation, "ranks bound to cores 0-2 and 2-3 have cores 2 in common", "note")


def test_a_container_s_quota():
    the_one(with_hardware(laptop(4), quota_cores=1.5), "the container allows 1.5 cores' time for 4 ranks", "slow")


def test_cores_that_srun_did_not_hand_on():
    allocation = with_ranks(frontier(1), lambda _, rank: dataclasses.replace(rank, cores=rank.cores[:1]))
    found = the_one(with_variable(allocation, "OMP_NUM_THREADS", None), "one core each", "slow")
    assert "--cpus-per-task=3" in found.fix or "--cpus-per-task=7" in found.fix
    many = with_ranks(laptop(2, 16), lambda place, rank: dataclasses.replace(rank, cores=(place,)))
    the_one(many, "may use 2 of its 16 cores", "slow")


def test_threads_that_do_not_fit():
    the_one(with_variable(laptop(2, 4), "OMP_NUM_THREADS", "4"), "OMP_NUM_THREADS=4 on 2 cores a rank", "slow")
    found = the_one(with_variable(laptop(1, 64), "OMP_NUM_THREADS", "1"), "OMP_NUM_THREADS=1 on 64 cores", "slow")
    assert found.fix.startswith("export OMP_NUM_THREADS=64")


def test_cores_far_from_the_device_are_mended_by_the_documented_masks():
    """Cores in the order of the ranks, as one would guess: OLCF and LUMI document others, see platform tables."""
    guessed = [f"{8 * place + 1}-{8 * place + 7}" for place in range(8)]
    allocation = with_ranks(frontier(2), lambda place, rank: dataclasses.replace(rank, cores=numbers(guessed[place])))
    found = the_one(allocation, "cores are far from the device", "slow")
    masks = found.fix.removeprefix("srun --cpu-bind=mask_cpu:").split(",")
    assert masks == [hex(sum(1 << core for core in numbers(cores))) for cores in GCD_CORES]
    assert masks[0] == hex(0xFE << 48)
    assert masks[7] == hex(0xFE << 40)
    assert "frontier[0000-0001]" in found.where


def test_all_ranks_on_the_first_domain_are_mended_by_masks_without_the_system_s_cores():
    allocation = with_ranks(frontier(1), lambda _, rank: dataclasses.replace(rank, cores=numbers("1-15")))
    allocation = with_variable(allocation, "OMP_NUM_THREADS", None)
    masks = the_one(allocation, "cores are far", "slow").fix.rpartition(":")[2].split(",")
    assert [int(mask, 16) for mask in masks] == [sum(1 << core for core in numbers(cores)) for cores in GCD_CORES]


@pytest.mark.parametrize(("policy", "severity"), [("NUMA", "breaks"), (None, "note")])
def test_a_rank_over_two_domains_has_no_network_card(policy, severity):
    allocation = with_ranks(frontier(1), lambda _, rank: dataclasses.replace(rank, cores=tuple(range(64))))
    allocation = with_variable(allocation, "MPICH_OFI_NIC_POLICY", policy)
    the_one(allocation, "ranks span NUMA domains", severity)


def test_a_shared_device_names_its_ranks():
    def same(place: int, rank: RankFacts) -> RankFacts:
        return dataclasses.replace(rank, device=perlmutter().first.device if place in (1, 2) else rank.device)

    allocation = with_ranks(perlmutter(2), same)
    found = the_one(allocation, "3 ranks share the device 0000:01:00.0", "slow")
    assert found.where == "ranks 0-2, 4-6 on nid[00000-00001]"
    assert "--gpu-bind=none" in found.fix


@pytest.mark.parametrize(("used", "severity"), [(4, "slow"), (7, "note")])
def test_idle_devices(used, severity):
    allocation = frontier(1)
    facts = allocation.nodes[0].facts
    less = dataclasses.replace(facts, ranks=facts.ranks[:used])
    node = dataclasses.replace(allocation.nodes[0], ranks=tuple(range(used)), facts=less)
    allocation = dataclasses.replace(allocation, nodes=(node,), launched=used)
    the_one(allocation, f"{8 - used} of 8 devices of a node are left idle", severity)


def test_gpus_that_nobody_uses():
    blind = with_ranks(perlmutter(1), replaced(device=None, no_device="built for CPUs alone"))
    assert "a PyTorch built for CUDA" in the_one(blind, "the node has 4 nvidia GPUs", "slow").fix
    wanted = with_ranks(perlmutter(1), replaced(device=None, no_device="run.device = 'cpu'"))
    assert not [finding for finding in check(wanted) if "nvidia GPUs" in finding.what]


def test_a_pytorch_for_other_devices():
    def other(_: int, rank: RankFacts) -> RankFacts:
        return dataclasses.replace(rank, device=dataclasses.replace(rank.device, unfit="no kernel image is available"))

    the_one(with_ranks(perlmutter(1), other), "no kernel image is available", "breaks")


def test_a_device_that_takes_one_process_is_no_device_for_two():
    def second(place: int, rank: RankFacts, unfit: str) -> RankFacts:
        first = perlmutter().nodes[0].facts.ranks[0].device
        assert first
        assert rank.device
        shared = first if place == 1 else rank.device
        return dataclasses.replace(
            rank, device=dataclasses.replace(shared, one_process=True, unfit=unfit if place == 1 else "")
        )

    words = "2 ranks share the device 0000:01:00.0, in the compute mode EXCLUSIVE_PROCESS"
    alone = with_ranks(perlmutter(), lambda place, rank: second(place, rank, "all devices are busy"))
    assert "ranks 0-1, 4-5 on" in the_one(alone, words, "breaks").where
    by_mps = with_ranks(perlmutter(), lambda place, rank: second(place, rank, ""))
    the_one(by_mps, words, "note")
    each = with_ranks(perlmutter(), lambda _, rank: dataclasses.replace(
        rank, device=dataclasses.replace(rank.device, one_process=True)  # type: ignore[type-var]
    ))  # fmt: skip
    assert check(each) == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_that_mpi_cannot_map_is_warned_of(name):
    for setting in ("expandable_segments:True", "max_split_size_mb:64, expandable_segments : true"):
        found = the_one(with_variable(frontier(), name, setting), f"{name} has expandable_segments", "slow")
        assert found.fix.startswith(f"leave it out of {name}")
        assert not check(with_variable(laptop(2), name, setting))  # the CPU's memory is the kernel's
    for setting in (
        "",
        "max_split_size_mb:64",
        "expandable_segments:False",
        "expandable_segments:True,expandable_segments:False",
    ):
        assert not check(with_variable(frontier(), name, setting))


def test_ranks_that_mpi_did_not_bring_together():
    allocation = dataclasses.replace(laptop(1), launcher="slurm", launched=16)
    assert "--mpi=pmi2" in the_one(allocation, "16 ranks were started, but each is alone", "breaks").fix
    allocation = dataclasses.replace(allocation, launcher="flux")
    assert "flux run --setopt=pmi=" in the_one(allocation, "16 ranks were started, but each is alone", "breaks").fix


def test_cray_mpich_and_its_gpu_layer():
    without = with_ranks(
        frontier(2), lambda _, r: dataclasses.replace(r, library=dataclasses.replace(r.library, gpu_layer=False))
    )
    the_one(without, "libmpi_gtl_* is not loaded", "breaks")
    off = with_variable(frontier(2), "MPICH_GPU_SUPPORT_ENABLED", None)
    assert the_one(off, "MPI is not told to read", "slow").fix == "export MPICH_GPU_SUPPORT_ENABLED=1"
    the_one(with_variable(frontier(1), "MPICH_GPU_SUPPORT_ENABLED", None), "MPI is not told to read", "note")


@pytest.mark.parametrize(
    ("name", "value", "words", "severity"),
    [
        ("FI_MR_CACHE_MONITOR", "memhooks", "can deadlock", "slow"),
        ("FI_MR_CACHE_MONITOR", "disabled", "registers memory anew", "slow"),
        ("FI_CXI_RDZV_PROTO", "alt_read", "suits RCCL", "note"),
        ("HUGETLB_DEFAULT_PAGE_SIZE", None, "no huge pages", "note"),
        ("CXI_FORK_SAFE", None, "CXI_FORK_SAFE", "note"),
    ],
)
def test_variables(name, value, words, severity):
    the_one(with_variable(frontier(), name, value), words, severity)


def test_a_variable_that_is_fine():
    assert check(with_variable(frontier(), "FI_MR_CACHE_MONITOR", "kdreg2")) == []


def test_a_wheel_on_a_machine_with_a_fast_network():
    wheels = with_ranks(frontier(2), replaced(library=WHEEL))
    assert "MPICC='cc -shared'" in the_one(wheels, "does not know slingshot", "slow").fix


def test_limits():
    the_one(with_ranks(frontier(), replaced(locked_bytes=64 << 10)), "only 64 KiB of memory may be locked", "breaks")
    assert check(with_ranks(laptop(), replaced(locked_bytes=64 << 10))) == []  # no network card to register it with
    the_one(with_ranks(laptop(), replaced(open_files=100)), "may open 100 files", "breaks")
    the_one(with_ranks(laptop(), replaced(open_files=1000)), "may open 1000 files", "note")


def test_less_threading_is_told():
    library = dataclasses.replace(WHEEL, threads="SINGLE")
    the_one(with_ranks(laptop(), replaced(library=library)), "THREAD_SINGLE", "note")


def test_the_odd_node_of_three():
    hardware = frontier().nodes[0].facts.hardware
    odd = with_hardware(frontier(3), [1], gpus=hardware.gpus[:7])
    found = the_one(odd, "7 GPUs, where most nodes have 8", "slow")
    assert found.fix == "exclude it: sbatch --exclude=frontier0001"
    assert found.where == "ranks 8-15 on frontier0001"
    down = (dataclasses.replace(hardware.nics[0], up=False), *hardware.nics[1:])
    assert (
        "frontier0002"
        in the_one(with_hardware(frontier(3), [2], nics=down), "cxi0 of 4 network cards is down", "slow").where
    )
    less = with_hardware(frontier(3), [0], memory=Memory(256 * GB, 256 * GB, 0, 128 * GB))
    assert "frontier0000" in the_one(less, "256 GB of memory, where most nodes have 512 GB", "note").where


def test_software_that_differs():
    old = tuple(
        ("torch", "2.7.1") if name == "torch" else (name, version) for name, version in frontier().first.software
    )
    mixed = with_ranks(frontier(3), replaced(software=old), [2])
    found = the_one(mixed, "torch is 2.7.1 there, and 2.9.0 on most ranks", "breaks")
    assert found.where == "ranks 16-23 on frontier0002"
    facts = frontier().nodes[0].facts
    nodes = [
        dataclasses.replace(node, facts=dataclasses.replace(facts, source="ab" if node.ranks[0] else "cd"))
        for node in frontier(3).nodes
    ]
    mixed = dataclasses.replace(frontier(3), nodes=tuple(nodes))
    the_one(mixed, "hpcllm's source text (hash) is cd there", "breaks")


def test_nodes_that_drift_work_for_others_or_have_no_shared_memory():
    the_one(with_gauges(frontier(3), [1], unix_s=1e9 + 7), "frontier0001 is +7.0 s from most", "note")
    the_one(with_gauges(frontier(3), [1], others_cores=50.0), "they keep 50.0 of the 56 cores of our ranks", "slow")
    the_one(with_gauges(frontier(3), [1], others_cores=20.0), "they keep 20.0 of the 56 cores of our ranks", "note")
    assert check(with_gauges(frontier(3), [1], others_cores=1.0)) == []
    the_one(with_gauges(frontier(3), [2], shared_free_bytes=64 << 20), "/dev/shm has 67.1 MB free", "slow")


def test_nodes_with_fewer_ranks_and_hosts_that_are_two():
    nodes = list(frontier(3).nodes)
    facts = dataclasses.replace(nodes[2].facts, ranks=nodes[2].facts.ranks[:5])
    nodes[2] = dataclasses.replace(nodes[2], ranks=nodes[2].ranks[:5], facts=facts)
    the_one(dataclasses.replace(frontier(3), nodes=tuple(nodes), launched=21), "different numbers of ranks", "note")
    twins = [dataclasses.replace(node, name="vm") for node in frontier(2).nodes]
    the_one(dataclasses.replace(frontier(2), nodes=tuple(twins)), "ranks of one host for ranks of several", "note")


def test_a_fault_of_one_rank_is_a_finding():
    broken = with_ranks(frontier(3), lambda place, r: dataclasses.replace(r, fault="the device: x" * (place == 3)), [1])
    assert the_one(broken, "could not find out the device: x", "note").where == "rank 11 on frontier0001"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken(allocation):
        raise KeyError(allocation.size)

    monkeypatch.setattr(checks, "CHECKS", (broken,))
    assert [finding.severity for finding in check(laptop())] == ["note"]
    assert "the check `broken` failed: KeyError" in check(laptop())[0].what


def test_the_worst_comes_first_and_ten_thousand_nodes_are_one_line():
    allocation = with_variable(with_variable(frontier(10000), "CXI_FORK_SAFE", None), "FI_MR_CACHE_MONITOR", "memhooks")
    allocation = with_ranks(allocation, replaced(locked_bytes=1))
    found = check(allocation)
    assert [finding.severity for finding in found] == sorted(
        (f.severity for f in found), key=("breaks", "slow", "note").index
    )
    assert all(len(finding.where) < 150 for finding in found)
    assert found[0].where == "ranks 0-79999 on frontier[0000-0007], ... (10000 nodes)"
