"""GPUs of a node, whether or not a PyTorch here can use them.

    /sys/class/drm/card0/device          -> ../../../0000:c1:00.0 with vendor, class, numa_node
    /proc/driver/nvidia/gpus/0000:01:00.0   NVIDIA's driver does not always make a card

A display of the main board (ASPEED, Matrox) and a processor's own graphics are none.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcllm.hardware.sysfs import MACHINE, Root

VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}
# PCI class, 16 bits: 0300 a display, 0302 a 3D controller, 0380 another one, 1200 a processing accelerator
_COMPUTE = {"nvidia": (0x0300, 0x0302), "amd": (0x0380, 0x1200), "intel": (0x0380,)}
_INTEL_MAX = 0x0BD0  # Data Center GPU Max has PCI numbers 0bd0 to 0bdf; others of Intel's are in laptops


@dataclass(frozen=True)
class Gpu:
    pci: str  # 0000:c1:00.0
    vendor: str
    numa: int | None


def find_gpus(root: Root = MACHINE) -> tuple[Gpu, ...]:
    """Those that compute, by PCI address."""
    cards = {root.target(f"sys/class/drm/{name}/device") for name in root.names("sys/class/drm") if "-" not in name}
    nvidia = set(root.names("proc/driver/nvidia/gpus"))
    found = (_gpu(root, pci, pci in nvidia) for pci in sorted((cards | nvidia) - {""}))
    return tuple(gpu for gpu in found if gpu)


def numa_of_pci(pci: str, root: Root = MACHINE) -> int | None:
    """The NUMA domain of a PCI device, such as '0000:c1:00.0'; None if the kernel does not know."""
    domain = root.number(f"sys/bus/pci/devices/{pci.lower()}/numa_node")
    return domain if domain is not None and domain >= 0 else None


def _gpu(root: Root, pci: str, driven_by_nvidia: bool) -> Gpu | None:
    folder = f"sys/bus/pci/devices/{pci}"
    vendor = "nvidia" if driven_by_nvidia else VENDORS.get(root.number(f"{folder}/vendor") or 0, "")
    kind = (root.number(f"{folder}/class") or 0) >> 8
    computes = driven_by_nvidia or kind in _COMPUTE.get(vendor, ())
    if vendor == "intel":
        computes = computes and (root.number(f"{folder}/device") or 0) & ~0xF == _INTEL_MAX
    return Gpu(pci, vendor, numa_of_pci(pci, root)) if computes else None
