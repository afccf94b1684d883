"""Checks of where ranks run: cores that they share, leave idle, or have far from their device. Pure.

masks of a node's ranks   0-7  0-7  0-7      enough cores for all of them: system/affinity.py deals them out
                          0    0    0        more ranks than cores inside a mask: they take turns
                          0-7  4-11          some cores in common, by mistake

Checks of devices stand here too: those that are shared, idle, unseen or unfit.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcllm.preflight.facts import Allocation, Kind, RankFacts
from hpcllm.preflight.findings import (
    Finding,
    all_ranks_one_job,
    core_masks,
    cores_each,
    everywhere,
    on,
    one_device_each,
    ranks_a_node,
)
from hpcllm.system.affinity import Allowed, near_cores
from hpcllm.system.device import VISIBILITY
from hpcllm.system.hardware.sysfs import list_text

Cores = tuple[int, ...]
GCDS = 8  # of a node of MI250X: the first core of each cache is left to the system on Frontier and LUMI
FEW = 2  # cores: a rank with a device has threads for Python, for messages and for data


def one_job(allocation: Allocation) -> Iterator[Finding]:
    if allocation.size == 1 and allocation.launched > 1:
        yield Finding(
            "breaks",
            f"{allocation.launched} ranks were started, but each is alone in its MPI: the library "
            f"({allocation.first.library.version}) does not hear the launcher",
            everywhere(allocation),
            all_ranks_one_job(allocation),
        )


def crowded(allocation: Allocation) -> Iterator[Finding]:
    """More ranks than cores inside a mask: by Hall's theorem some of them share a core."""
    for kind in allocation.kinds:
        seen: list[set[int]] = []
        masks = _masks(kind)
        every = tuple(sorted({core for mask in masks for core in mask}))
        for mask in sorted({*masks, every}, key=len):
            inside = [place for place, other in enumerate(masks) if set(other) <= set(mask)]
            if len(inside) <= len(mask) or any(before <= set(mask) for before in seen):
                continue
            seen.append(set(mask))
            cores = f"{len(mask)} core{'s' if len(mask) > 1 else ''} ({list_text(mask)})"
            yield Finding("slow", f"{len(inside)} ranks share {cores}", on(kind, inside), _give_room(allocation, kind))


def quota(allocation: Allocation) -> Iterator[Finding]:
    for kind in allocation.kinds:
        limit, ranks = kind.facts.hardware.quota_cores, len(kind.facts.ranks)
        if limit is not None and ranks > limit:
            what = f"the container allows {limit:g} cores' time for {ranks} ranks"
            yield Finding(
                "slow", what, on(kind), f"raise its limit (--cpus={ranks}), or start {max(1, int(limit))} ranks"
            )


def overlapping(allocation: Allocation) -> Iterator[Finding]:
    """Masks that have a part in common, which no launcher means to do."""
    for kind in allocation.kinds:
        masks = {mask: place for place, mask in reversed(list(enumerate(_masks(kind))))}
        pairs = ((a, b) for a in masks for b in masks if a < b and set(a) & set(b) and not set(a) <= set(b))
        for one, other in pairs:
            if set(other) <= set(one):
                continue
            common = list_text(set(one) & set(other))
            yield Finding(
                "note",
                f"ranks bound to cores {list_text(one)} and {list_text(other)} have cores {common} in common",
                on(kind, sorted((masks[one], masks[other]))),
                cores_each(allocation, max(1, _room(kind) // len(kind.facts.ranks))),
            )
            break


def idle_cores(allocation: Allocation) -> Iterator[Finding]:
    """Cores of the job that no rank may use: srun takes no --cpus-per-task from sbatch."""
    for kind in allocation.kinds:
        masks, room = _masks(kind), _room(kind)
        used = len({core for mask in masks for core in mask})
        each = room // len(masks)
        computes = any(facts.device is None for facts in kind.facts.ranks)
        if used < len(masks):  # see `crowded`
            continue
        if computes and 2 * used <= room and each >= 2:
            what = f"the ranks of a node may use {used} of its {room} cores"
        elif not computes and min(map(len, masks)) < FEW <= each:
            what = f"ranks with a device have one core each, and {room} cores are there for {len(masks)} ranks"
        else:
            continue
        yield Finding("slow", what, on(kind), cores_each(allocation, each))


def threads(allocation: Allocation) -> Iterator[Finding]:
    """OMP_NUM_THREADS against the cores that are a rank's own."""
    for kind in allocation.kinds:
        masks = _masks(kind)
        wrong: dict[tuple[int, int], list[int]] = {}
        for place, (mask, facts) in enumerate(zip(masks, kind.facts.ranks, strict=True)):
            text = facts.variable("OMP_NUM_THREADS").partition(",")[0]
            share = len(mask) // masks.count(mask)
            count = int(text) if text.isdecimal() else share
            few = facts.device is None and 4 * count <= share
            if share and (count > share or few):
                wrong.setdefault((count, share), []).append(place)
        for (count, share), places in wrong.items():
            cores = f"{share} core{'s' if share > 1 else ''}"
            what = f"OMP_NUM_THREADS={count} on {cores} a rank"
            yield Finding("slow", what, on(kind, places), f"export OMP_NUM_THREADS={share}, or unset it")


def far_cores(allocation: Allocation) -> Iterator[Finding]:
    """Ranks whose cores are all in another NUMA domain than their device."""
    for kind in allocation.kinds:
        topology = kind.facts.hardware.topology
        far = []
        for place, facts in enumerate(kind.facts.ranks):
            numa = facts.device.numa if facts.device else None
            if numa is not None and topology.of_domain(numa) and numa not in topology.domains_of(facts.cores):
                far.append(place)
        if far:
            shares = near_cores(_places(kind), topology, _base(kind))
            devices = ", ".join(sorted({_address(kind, place) for place in far})[:GCDS])
            what = f"cores are far from the device, in another NUMA domain ({devices})"
            yield Finding("slow", what, on(kind, far), core_masks(allocation, shares))


def across_domains(allocation: Allocation) -> Iterator[Finding]:
    """Cray MPICH gives a rank the network card of its NUMA domain, and a rank in several has none."""
    policy = allocation.first.variable("MPICH_OFI_NIC_POLICY").upper()
    if "CRAY MPICH" not in allocation.first.library.version.upper() or policy not in ("", "NUMA", "GPU"):
        return
    for kind in allocation.kinds:
        topology = kind.facts.hardware.topology
        across = [p for p, facts in enumerate(kind.facts.ranks) if len(topology.domains_of(facts.cores)) > 1]
        if across and len(kind.facts.hardware.nics) > 1 and len(kind.facts.ranks) > 1:
            each = max(1, _room(kind) // len(kind.facts.ranks))
            yield Finding(
                "breaks" if policy == "NUMA" else "note",
                f"ranks span NUMA domains, with several network cards and MPICH_OFI_NIC_POLICY={policy or '(unset)'}",
                on(kind, across),
                f"{cores_each(allocation, each)}; or MPICH_OFI_NIC_POLICY=USER with MPICH_OFI_NIC_MAPPING",
            )


def cores_of(kind: Kind) -> list[tuple[int, ...]]:
    """The hardware threads that hpcllm would give the ranks of such a node, near their devices."""
    return near_cores(_places(kind), kind.facts.hardware.topology, _base(kind))


def _masks(kind: Kind) -> list[Cores]:
    """Cores that each rank may use; hardware threads of one core count as one."""
    return [kind.facts.hardware.topology.physical(facts.cores) for facts in kind.facts.ranks]


def _room(kind: Kind) -> int:
    """Cores of a node that the job has: all, or as many as Slurm says."""
    topology = kind.facts.hardware.topology
    there = len(topology.physical(topology.numbers))
    text = kind.facts.ranks[0].variable("SLURM_CPUS_ON_NODE")
    halves = max(1, len(topology.cores) // max(there, 1))
    granted = -(-int(text) // halves) if text.isdecimal() else there
    used = len({core for mask in _masks(kind) for core in mask})
    return max(min(there, granted), used, 1)


def _give_room(allocation: Allocation, kind: Kind) -> str:
    room, ranks = _room(kind), len(kind.facts.ranks)
    return cores_each(allocation, room // ranks) if room >= ranks else ranks_a_node(allocation, room)


def _places(kind: Kind) -> list[Allowed]:
    return [Allowed(facts.cores, facts.device.numa if facts.device else None) for facts in kind.facts.ranks]


def _base(kind: Kind) -> Cores:
    """Cores to deal out to the ranks: those they have together, if these are near to all of their devices."""
    hardware, places = kind.facts.hardware, _places(kind)
    topology = hardware.topology
    union = topology.first_threads({core for place in places for core in place.cores})
    wanted = [place.numa for place in places if place.numa is not None]
    if all(len(set(topology.of_domain(d)) & set(union)) >= wanted.count(d) for d in set(wanted)):
        return union
    every = topology.first_threads(topology.numbers)
    if len(hardware.gpus) == GCDS and all(gpu.vendor == "amd" for gpu in hardware.gpus):
        system = {core.cache for core in topology.cores}
        every = tuple(core for core in every if core not in system)
    return every


def _address(kind: Kind, place: int) -> str:
    device = kind.facts.ranks[place].device
    return device.address if device else ""


BUILDS = {"nvidia": "CUDA", "amd": "ROCm", "intel": "XPU"}


def shared(allocation: Allocation) -> Iterator[Finding]:
    """Two ranks of a node on one device: each has half of it, and less of its memory."""
    for kind in allocation.kinds:
        users: dict[str, list[int]] = {}
        for place, facts in enumerate(kind.facts.ranks):
            if facts.device:
                users.setdefault(facts.device.identity, []).append(place)
        for identity, places in users.items():
            if len(places) < 2:
                continue
            devices = max(_device_count(kind), len(kind.facts.hardware.gpus))
            bound = all(_was_given(facts) for facts in kind.facts.ranks)  # one each by the launcher, but the same one
            enough = bound or len(kind.facts.ranks) <= devices
            fix = one_device_each(allocation) if enough else ranks_a_node(allocation, devices)
            yield Finding("slow", f"{len(places)} ranks share the device {identity.strip()}", on(kind, places), fix)


def idle(allocation: Allocation) -> Iterator[Finding]:
    """Devices of a node that no rank takes."""
    for kind in allocation.kinds:
        used = {facts.device.identity for facts in kind.facts.ranks if facts.device}
        there = _device_count(kind)
        if used and len(used) < there:
            left = there - len(used)
            yield Finding(
                "slow" if 2 * left >= there else "note",
                f"{left} of {there} devices of a node are left idle",
                on(kind),
                ranks_a_node(allocation, there),
            )


def unseen(allocation: Allocation) -> Iterator[Finding]:
    """GPUs that are there, and ranks that compute on the CPU although nobody asked them to."""
    for kind in allocation.kinds:
        gpus = kind.facts.hardware.gpus
        blind = [place for place, facts in enumerate(kind.facts.ranks) if facts.device is None]
        reason = kind.facts.ranks[blind[0]].no_device if blind else ""
        if gpus and blind and reason != "run.device = 'cpu'":
            wanted = BUILDS[gpus[0].vendor]
            yield Finding(
                "slow",
                f"the node has {len(gpus)} {gpus[0].vendor} GPUs, and ranks compute on the CPU: {reason}",
                on(kind, blind),
                f"a PyTorch built for {wanted}, and devices from the batch system (--gpus-per-node={len(gpus)})",
            )


def unfit(allocation: Allocation) -> Iterator[Finding]:
    for kind, place, facts in allocation.everyone():
        if facts.device and facts.device.unfit:
            what = f"PyTorch {dict(facts.software).get('torch', '')} cannot compute on {facts.device.name}: "
            fix = "a PyTorch built for this device: torch.cuda.get_arch_list() names those that yours knows"
            yield Finding("breaks", what + facts.device.unfit, on(kind, [place]), fix)


def _device_count(kind: Kind) -> int:
    """Devices of the node as ranks see them together; those that the kernel shows may belong to other jobs."""
    seen = {facts.device.identity for facts in kind.facts.ranks if facts.device}
    return max([len(seen), *(facts.device.visible for facts in kind.facts.ranks if facts.device)])


def _was_given(facts: RankFacts) -> bool:
    """True if the launcher has left this rank one device of several."""
    return bool(facts.device and facts.device.visible == 1 and any(facts.variable(name) for name in VISIBILITY))


CHECKS = (
    one_job, crowded, quota, overlapping, idle_cores, threads, far_cores, across_domains,
    shared, idle, unseen, unfit,
)  # fmt: skip
