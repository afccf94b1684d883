"""Network interfaces of a node: of one with several drivers, the one that moves messages counts.

    /sys/class/infiniband/mlx5_0   ports/1/rate "200 Gb/sec (4X HDR)", ports/1/state "4: ACTIVE"
    /sys/class/cxi/cxi0            Slingshot; its speed is that of the Ethernet interface (hsn0) on the same PCI address
    /sys/class/net/eth0            speed in Mbit/s; virtual interfaces have no `device` and are no NICs

Source: Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net of the Linux kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcllm.hardware.sysfs import MACHINE, Root

RDMA = ("infiniband", "slingshot")  # kinds that register memory


@dataclass(frozen=True)
class Nic:
    name: str
    kind: str  # infiniband, slingshot or ethernet
    pci: str  # "" if not known
    numa: int | None
    rate_gb_s: float | None  # one way; None where the driver does not say
    up: bool


def find_nics(root: Root = MACHINE) -> tuple[Nic, ...]:
    """Each PCI device once."""
    ethernet = [_ethernet(root, name) for name in root.names("sys/class/net") if root.target(_device("net", name))]
    by_pci = {nic.pci: nic for nic in ethernet}
    found = [_infiniband(root, name) for name in root.names("sys/class/infiniband")]
    found += [_slingshot(root, name, by_pci) for name in root.names("sys/class/cxi") if re.fullmatch(r"cxi\d+", name)]
    taken = {nic.pci for nic in found}
    return (*found, *(nic for nic in ethernet if nic.pci not in taken))


def _ethernet(root: Root, name: str) -> Nic:
    folder = f"sys/class/net/{name}"
    mbit_s = root.number(f"{folder}/speed")
    rate = mbit_s / 8000 if mbit_s and mbit_s > 0 else None
    up = root.text(f"{folder}/operstate") == "up"
    return Nic(name, "ethernet", root.target(_device("net", name)), _numa(root, "net", name), rate, up)


def _infiniband(root: Root, name: str) -> Nic:
    ports = f"sys/class/infiniband/{name}/ports"
    port = f"{ports}/{(root.names(ports) or ['1'])[0]}"
    rate = re.match(r"([0-9.]+) Gb/sec", root.text(f"{port}/rate"))
    return Nic(
        name,
        "infiniband",
        root.target(_device("infiniband", name)),
        _numa(root, "infiniband", name),
        float(rate[1]) / 8 if rate else None,
        "ACTIVE" in root.text(f"{port}/state"),
    )


def _slingshot(root: Root, name: str, by_pci: dict[str, Nic]) -> Nic:
    pci = root.target(_device("cxi", name))
    twin = by_pci.get(pci)
    rate, up = (twin.rate_gb_s, twin.up) if twin else (None, True)
    return Nic(name, "slingshot", pci, _numa(root, "cxi", name), rate, up)


def _device(kind: str, name: str) -> str:
    return f"sys/class/{kind}/{name}/device"


def _numa(root: Root, kind: str, name: str) -> int | None:
    """None where the kernel says -1: it does not know."""
    domain = root.number(f"{_device(kind, name)}/numa_node")
    return domain if domain is not None and domain >= 0 else None
