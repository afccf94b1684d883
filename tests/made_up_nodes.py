"""Folders that look like /sys and /proc of machines that are not at hand."""

from __future__ import annotations

from pathlib import Path

from hpcllm.system.hardware.sysfs import Root


def write(root: Path, files: dict[str, str]) -> Root:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Root(root)


def link(root: Path, name: str, target: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / target).mkdir(parents=True, exist_ok=True)
    path.symlink_to(root / target)


# NUMA domain -> (GCD, its PCI address) as Frontier and LUMI number them: OLCF, "Frontier User Guide", node diagram
MI250X = {
    0: ("0000:d1:00.0", "0000:d6:00.0"),
    1: ("0000:c9:00.0", "0000:ce:00.0"),
    2: ("0000:d9:00.0", "0000:de:00.0"),
    3: ("0000:c1:00.0", "0000:c6:00.0"),
}


def mi250x_node(root: Path) -> Root:
    """64 cores of two threads, a cache for each 8 cores, 4 NUMA domains, 8 GCDs, 4 Slingshot cards of 200 Gbit/s."""
    files = {"sys/devices/system/cpu/online": "0-127", "proc/cpuinfo": "model name : AMD EPYC 7A53 64-Core Processor"}
    for core in range(128):
        one, cache = core % 64, core % 64 // 8 * 8
        folder = f"sys/devices/system/cpu/cpu{core}"
        files[f"{folder}/topology/thread_siblings_list"] = f"{one},{one + 64}"
        files[f"{folder}/topology/physical_package_id"] = "0"
        files[f"{folder}/cache/index3/shared_cpu_list"] = f"{cache}-{cache + 7},{cache + 64}-{cache + 71}"
    for domain, addresses in MI250X.items():
        first = 16 * domain
        folder = f"sys/devices/system/node/node{domain}"
        files[f"{folder}/cpulist"] = f"{first}-{first + 15},{first + 64}-{first + 79}"
        files[f"{folder}/distance"] = " ".join("10" if other == domain else "12" for other in range(4))
        card, nic = f"sys/class/net/hsn{domain}", f"sys/bus/pci/devices/0000:{domain + 1:02x}:00.0"
        files |= {f"{card}/speed": "200000", f"{card}/operstate": "up", f"{nic}/numa_node": str(domain)}
        for address in addresses:
            gpu = f"sys/bus/pci/devices/{address}"
            files |= {f"{gpu}/vendor": "0x1002", f"{gpu}/class": "0x038000", f"{gpu}/numa_node": str(domain)}
    files["proc/meminfo"] = (
        "MemTotal:  536000000 kB\nMemAvailable:  500000000 kB\nHugepagesize: 2048 kB\nHugePages_Total: 0"
    )
    write(root, files)
    for domain, addresses in MI250X.items():
        nic = f"sys/bus/pci/devices/0000:{domain + 1:02x}:00.0"
        link(root, f"sys/class/net/hsn{domain}/device", nic)
        link(root, f"sys/class/cxi/cxi{domain}/device", nic)
        for number, address in enumerate(addresses):
            link(root, f"sys/class/drm/card{2 * domain + number}/device", f"sys/bus/pci/devices/{address}")
    link(root, "sys/class/net/lo/statistics", "sys/devices/virtual/net/lo/statistics")
    return Root(root)
