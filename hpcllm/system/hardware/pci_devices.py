"""GPUs and network interfaces of a node, by PCI address, whether or not software here can use them.

    /sys/class/drm/card0/device             -> ../../../0000:c1:00.0 with vendor, class, numa_node
    /proc/driver/nvidia/gpus/0000:01:00.0   NVIDIA's driver does not always make a card
    /sys/class/infiniband/mlx5_0            ports/1/rate "200 Gb/sec (4X HDR)", ports/1/state "4: ACTIVE"
    /sys/class/cxi/cxi0                     Slingshot; its speed is that of the Ethernet interface (hsn0) at its address
    /sys/class/net/eth0                     speed in Mbit/s; virtual interfaces have no `device` and are no NICs

A display of the main board (ASPEED, Matrox) and a processor's own graphics are no GPUs. Of a NIC with several drivers
the one that moves messages counts. Source: Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net
of the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpcllm.system.hardware.sysfs import MACHINE, Root

VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}
# PCI class, 16 bits: 0300 a display, 0302 a 3D controller, 0380 another one, 1200 a processing accelerator
_COMPUTE = {"nvidia": (0x0300, 0x0302), "amd": (0x0380, 0x1200), "intel": (0x0380,)}
_INTEL_MAX = 0x0BD0  # Data Center GPU Max has PCI numbers 0bd0 to 0bdf; others of Intel's are in laptops
RDMA = ("infiniband", "slingshot")  # kinds that register memory


@dataclass(frozen=True)
class Gpu:
    pci: str  # 0000:c1:00.0
    vendor: str
    numa: int | None


def find_gpus(root: Root = MACHINE) -> tuple[Gpu, ...]:
    """Return the GPUs that compute, by PCI address."""
    cards = {root.target(f"sys/class/drm/{name}/device") for name in root.names("sys/class/drm") if "-" not in name}
    nvidia = set(root.names("proc/driver/nvidia/gpus"))
    found = (_gpu(root, pci, pci in nvidia) for pci in sorted((cards | nvidia) - {""}))
    return tuple(gpu for gpu in found if gpu)


def numa_of_pci(pci: str, root: Root = MACHINE) -> int | None:
    """Return the NUMA domain of a PCI device, such as '0000:c1:00.0'; None if the kernel does not know."""
    return _numa(root, f"sys/bus/pci/devices/{pci.lower()}")


@dataclass(frozen=True)
class Nic:
    name: str
    kind: str  # infiniband, slingshot or ethernet
    pci: str  # "" if not known
    numa: int | None
    rate_gb_s: float | None  # one way; None where the driver does not say
    up: bool


def find_nics(root: Root = MACHINE) -> tuple[Nic, ...]:
    """Return the network interfaces, each PCI device once."""
    ethernet = [_ethernet(root, name) for name in root.names("sys/class/net") if root.target(_device("net", name))]
    by_pci = {nic.pci: nic for nic in ethernet}
    found = [_infiniband(root, name) for name in root.names("sys/class/infiniband")]
    found += [_slingshot(root, name, by_pci) for name in root.names("sys/class/cxi") if re.fullmatch(r"cxi\d+", name)]
    taken = {nic.pci for nic in found}
    return (*found, *(nic for nic in ethernet if nic.pci not in taken))


def wire_gb_s(nics: Iterable[Nic]) -> float | None:
    """Return what a node sends at most, of interfaces that are up: all that register memory, else the fastest other.

    None where no driver says. Nobody can tell from here which interfaces an MPI library takes.
    """
    rates = [(nic.kind in RDMA, nic.rate_gb_s) for nic in nics if nic.up and nic.rate_gb_s]
    return sum(rate for is_rdma, rate in rates if is_rdma) or max((rate for _, rate in rates), default=None)


def _gpu(root: Root, pci: str, driven_by_nvidia: bool) -> Gpu | None:
    folder = f"sys/bus/pci/devices/{pci}"
    vendor = "nvidia" if driven_by_nvidia else VENDORS.get(root.number(f"{folder}/vendor") or 0, "")
    kind = (root.number(f"{folder}/class") or 0) >> 8
    computes = driven_by_nvidia or kind in _COMPUTE.get(vendor, ())
    if vendor == "intel":
        computes = computes and (root.number(f"{folder}/device") or 0) & ~0xF == _INTEL_MAX
    return Gpu(pci, vendor, numa_of_pci(pci, root)) if computes else None


def _ethernet(root: Root, name: str) -> Nic:
    folder = f"sys/class/net/{name}"
    mbit_s = root.number(f"{folder}/speed")
    rate = mbit_s / 8000 if mbit_s and mbit_s > 0 else None
    up = root.text(f"{folder}/operstate") == "up"
    return Nic(name, "ethernet", root.target(_device("net", name)), _numa(root, _device("net", name)), rate, up)


def _infiniband(root: Root, name: str) -> Nic:
    ports = f"sys/class/infiniband/{name}/ports"
    port = f"{ports}/{(root.names(ports) or ['1'])[0]}"
    rate = re.match(r"([0-9.]+) Gb/sec", root.text(f"{port}/rate"))
    return Nic(
        name,
        "infiniband",
        root.target(_device("infiniband", name)),
        _numa(root, _device("infiniband", name)),
        float(rate[1]) / 8 if rate else None,
        "ACTIVE" in root.text(f"{port}/state"),
    )


def _slingshot(root: Root, name: str, by_pci: dict[str, Nic]) -> Nic:
    pci = root.target(_device("cxi", name))
    net = by_pci.get(pci)
    rate, up = (net.rate_gb_s, net.up) if net else (None, True)
    return Nic(name, "slingshot", pci, _numa(root, _device("cxi", name)), rate, up)


def _device(kind: str, name: str) -> str:
    return f"sys/class/{kind}/{name}/device"


def _numa(root: Root, device: str) -> int | None:
    """Read a device's NUMA domain; None where the kernel says -1: it does not know."""
    domain = root.number(f"{device}/numa_node")
    return domain if domain is not None and domain >= 0 else None
