"""Checks of what ranks compute on: devices that are shared, idle, unseen or unfit. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hpcllm.device import VISIBILITY
from hpcllm.preflight import mends
from hpcllm.preflight.facts import Allocation, Kind, RankFacts
from hpcllm.preflight.findings import Finding, on

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
            devices = max(_count(kind), len(kind.facts.hardware.gpus))
            bound = all(_was_given(facts) for facts in kind.facts.ranks)  # one each by the launcher, but the same one
            enough = bound or len(kind.facts.ranks) <= devices
            mend = mends.one_device_each(allocation) if enough else mends.ranks_a_node(allocation, devices)
            yield Finding("slow", f"{len(places)} ranks share the device {identity.strip()}", on(kind, places), mend)


def idle(allocation: Allocation) -> Iterator[Finding]:
    """Devices of a node that no rank takes."""
    for kind in allocation.kinds:
        used = {facts.device.identity for facts in kind.facts.ranks if facts.device}
        there = _count(kind)
        if used and len(used) < there:
            left = there - len(used)
            yield Finding(
                "slow" if 2 * left >= there else "note",
                f"{left} of {there} devices of a node are left idle",
                on(kind),
                mends.ranks_a_node(allocation, there),
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
                f"a PyTorch built for {wanted}, and devices asked of the batch system (--gpus-per-node={len(gpus)})",
            )


def unfit(allocation: Allocation) -> Iterator[Finding]:
    for kind, place, facts in allocation.everyone():
        if facts.device and facts.device.unfit:
            what = f"PyTorch {dict(facts.software).get('torch', '')} cannot compute on {facts.device.name}: "
            mend = "a PyTorch built for this device: torch.cuda.get_arch_list() names those that yours knows"
            yield Finding("breaks", what + facts.device.unfit, on(kind, [place]), mend)


def _count(kind: Kind) -> int:
    """Devices of the node as ranks see them together; those that the kernel shows may belong to other jobs."""
    seen = {facts.device.identity for facts in kind.facts.ranks if facts.device}
    return max([len(seen), *(facts.device.visible for facts in kind.facts.ranks if facts.device)])


def _was_given(facts: RankFacts) -> bool:
    """Whether the launcher has left this rank one device of several."""
    return bool(facts.device and facts.device.visible == 1 and any(facts.variable(name) for name in VISIBILITY))


CHECKS = (shared, idle, unseen, unfit)
