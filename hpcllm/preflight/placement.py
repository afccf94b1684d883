"""Checks of where ranks run: cores that they share, leave idle, or have far from their device. Pure.

masks of a node's ranks   0-7  0-7  0-7      enough cores for all of them: system/affinity.py deals them out
                          0    0    0        more ranks than cores inside a mask: they take turns
                          0-7  4-11          some cores in common, by mistake

Checks of devices stand here too: those that are shared, idle, unseen or unfit.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcllm.preflight.facts import Allocation, Kind, RankFacts
from hpcllm.preflight.findings import Fault, Severity, core_masks, cores_each, one_device_each, ranks_a_node
from hpcllm.system.affinity import Allowed, near_cores
from hpcllm.system.device import VISIBILITY
from hpcllm.system.hardware.sysfs import list_text
from hpcllm.system.text import counted

Cores = tuple[int, ...]
GCDS = 8  # of a node of MI250X: the first core of each cache is left to the system on Frontier and LUMI
FEW = 2  # cores: a rank with a device has threads for Python, for messages and for data
BUILDS = {"nvidia": "CUDA", "amd": "ROCm", "intel": "XPU"}


def crowded(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """More ranks than cores inside a mask: by Hall's theorem some of them share a core."""
    seen: list[set[int]] = []
    masks, room, ranks = _masks(kind), _room(kind), len(kind.facts.ranks)
    every = tuple(sorted({core for mask in masks for core in mask}))
    for mask in sorted({*masks, every}, key=len):
        inside = [place for place, other in enumerate(masks) if set(other) <= set(mask)]
        if len(inside) <= len(mask) or any(before <= set(mask) for before in seen):
            continue
        seen.append(set(mask))
        fix = cores_each(allocation, room // ranks) if room >= ranks else ranks_a_node(allocation, room)
        yield "slow", f"{len(inside)} ranks share {counted(len(mask), 'core')} ({list_text(mask)})", inside, fix


def quota(_: Allocation, kind: Kind) -> Iterator[Fault]:
    limit, ranks = kind.facts.hardware.quota_cores, len(kind.facts.ranks)
    if limit is not None and ranks > limit:
        fix = f"raise its limit (--cpus={ranks}), or start {max(1, int(limit))} ranks"
        yield "slow", f"the container allows {limit:g} cores' time for {ranks} ranks", None, fix


def overlapping(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Masks that have a part in common, which no launcher means to do."""
    masks = {mask: place for place, mask in reversed(list(enumerate(_masks(kind))))}
    pairs = ((a, b) for a in masks for b in masks if a < b and set(a) & set(b))
    for one, other in pairs:
        common = set(one) & set(other)
        if common not in (set(one), set(other)):
            masked = f"ranks bound to cores {list_text(one)} and {list_text(other)}"
            fix = cores_each(allocation, _cores_a_rank(kind))
            yield "note", f"{masked} have cores {list_text(common)} in common", sorted((masks[one], masks[other])), fix
            return


def idle_cores(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Cores of the job that no rank may use: srun takes no --cpus-per-task from sbatch."""
    masks, room = _masks(kind), _room(kind)
    used, each = len({core for mask in masks for core in mask}), room // len(masks)
    computes = any(facts.device is None for facts in kind.facts.ranks)
    if used < len(masks):  # see `crowded`
        return
    if computes and 2 * used <= room and each >= 2:
        what = f"the ranks of a node may use {used} of its {room} cores"
    elif not computes and min(map(len, masks)) < FEW <= each:
        what = f"ranks with a device have one core each, and {room} cores are there for {len(masks)} ranks"
    else:
        return
    yield "slow", what, None, cores_each(allocation, each)


def threads(_: Allocation, kind: Kind) -> Iterator[Fault]:
    """OMP_NUM_THREADS against the cores that are a rank's own."""
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
        fix = f"export OMP_NUM_THREADS={share}, or unset it"
        yield "slow", f"OMP_NUM_THREADS={count} on {counted(share, 'core')} a rank", places, fix


def far_cores(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Ranks whose cores are all in another NUMA domain than their device."""
    topology, addresses, far = kind.facts.hardware.topology, set[str](), []
    for place, facts in enumerate(kind.facts.ranks):
        numa = facts.device.numa if facts.device else None
        if (
            facts.device
            and numa is not None
            and topology.of_domain(numa)
            and numa not in topology.domains_of(facts.cores)
        ):
            far.append(place)
            addresses.add(facts.device.address)
    if far:
        devices = ", ".join(sorted(addresses)[:GCDS])
        what = f"cores are far from the device, in another NUMA domain ({devices})"
        yield "slow", what, far, core_masks(allocation, near_cores(_allowed(kind), topology, _base(kind)))


def across_domains(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Cray MPICH gives a rank the network card of its NUMA domain, and a rank in several has none."""
    policy = allocation.first.variable("MPICH_OFI_NIC_POLICY").upper()
    hardware, ranks = kind.facts.hardware, kind.facts.ranks
    across = [place for place, facts in enumerate(ranks) if len(hardware.topology.domains_of(facts.cores)) > 1]
    several = across and len(hardware.nics) > 1 and len(ranks) > 1
    if several and allocation.first.library.is_cray and policy in ("", "NUMA", "GPU"):
        what = f"ranks span NUMA domains, with several network cards and MPICH_OFI_NIC_POLICY={policy or '(unset)'}"
        other = "MPICH_OFI_NIC_POLICY=USER with MPICH_OFI_NIC_MAPPING"
        fix = f"{cores_each(allocation, _cores_a_rank(kind))}; or {other}"
        yield "breaks" if policy == "NUMA" else "note", what, across, fix


def shared(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Two ranks of a node on one device: each has half of it, and less of its memory."""
    users: dict[str, list[int]] = {}
    for place, facts in enumerate(kind.facts.ranks):
        if facts.device:
            users.setdefault(facts.device.identity, []).append(place)
    devices = max(_device_count(kind), len(kind.facts.hardware.gpus))
    bound = all(map(_was_given, kind.facts.ranks))  # one each by the launcher, but the same one
    enough = bound or len(kind.facts.ranks) <= devices
    for identity, places in users.items():
        if len(places) > 1:
            fix = one_device_each(allocation) if enough else ranks_a_node(allocation, devices)
            yield "slow", f"{len(places)} ranks share the device {identity.strip()}", places, fix


def one_process(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Ranks that share a device whose driver lets one process have it: by MPS they may, else all but one fail."""
    users: dict[str, list[int]] = {}
    for place, facts in enumerate(kind.facts.ranks):
        if facts.device and facts.device.one_process:
            users.setdefault(facts.device.identity, []).append(place)
    for identity, places in users.items():
        if len(places) > 1:
            works = not any(facts.device and facts.device.unfit for facts in kind.facts.ranks)
            what = f"{len(places)} ranks share the device {identity.strip()}, in the compute mode EXCLUSIVE_PROCESS"
            fix = f"{one_device_each(allocation)}; or NVIDIA's MPS; or nvidia-smi --compute-mode=DEFAULT, by the site"
            yield "note" if works else "breaks", what, places, fix


def idle(allocation: Allocation, kind: Kind) -> Iterator[Fault]:
    """Devices of a node that no rank takes."""
    used = {facts.device.identity for facts in kind.facts.ranks if facts.device}
    there = _device_count(kind)
    left = there - len(used)
    if used and left > 0:
        severity: Severity = "slow" if 2 * left >= there else "note"
        yield severity, f"{left} of {there} devices of a node are left idle", None, ranks_a_node(allocation, there)


def unseen(_: Allocation, kind: Kind) -> Iterator[Fault]:
    """GPUs that are there, and ranks that compute on the CPU although nobody asked them to."""
    gpus, ranks = kind.facts.hardware.gpus, kind.facts.ranks
    blind = [place for place, facts in enumerate(ranks) if facts.device is None]
    if gpus and blind and (reason := ranks[blind[0]].no_device) != "run.device = 'cpu'":
        vendor, count = gpus[0].vendor, len(gpus)
        what = f"the node has {count} {vendor} GPUs, and ranks compute on the CPU: {reason}"
        fix = f"a PyTorch built for {BUILDS[vendor]}, and devices from the batch system (--gpus-per-node={count})"
        yield "slow", what, blind, fix


def unfit(_: Allocation, kind: Kind) -> Iterator[Fault]:
    for place, facts in enumerate(kind.facts.ranks):
        if facts.device and facts.device.unfit:
            what = f"PyTorch {dict(facts.software).get('torch', '')} cannot compute on {facts.device.name}: "
            fix = "a PyTorch built for this device: torch.cuda.get_arch_list() names those that yours knows"
            yield "breaks", what + facts.device.unfit, [place], fix


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


def _cores_a_rank(kind: Kind) -> int:
    return max(1, _room(kind) // len(kind.facts.ranks))


def _allowed(kind: Kind) -> list[Allowed]:
    return [Allowed(facts.cores, facts.device.numa if facts.device else None) for facts in kind.facts.ranks]


def _base(kind: Kind) -> Cores:
    """Cores to deal out to the ranks: those they have together, if these are near to all of their devices."""
    hardware, places = kind.facts.hardware, _allowed(kind)
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


def _device_count(kind: Kind) -> int:
    """Devices of the node as ranks see them together; those that the kernel shows may belong to other jobs."""
    seen = {facts.device.identity for facts in kind.facts.ranks if facts.device}
    return max([len(seen), *(facts.device.visible for facts in kind.facts.ranks if facts.device)])


def _was_given(facts: RankFacts) -> bool:
    """True if the launcher has left this rank one device of several."""
    return bool(facts.device and facts.device.visible == 1 and any(facts.variable(name) for name in VISIBILITY))


CHECKS = (
    crowded, quota, overlapping, idle_cores, threads, far_cores, across_domains, shared, one_process, idle, unseen,
    unfit,
)  # fmt: skip
