"""Folders that look like /sys of nodes that measure their energy, and change as those do."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def cray(sysfs: Path, energy_j: float, accelerators: tuple[float, ...] = (), freshness: int = 1) -> None:
    """As an HPE Cray EX node writes its counters."""
    folder = sysfs / "cray" / "pm_counters"
    put(folder / "energy", f"{energy_j:.0f} J 1669374958452345 us")
    put(folder / "power", "1234 W 1669374958452345 us")
    put(folder / "freshness", freshness)
    put(folder / "generation", 3)
    put(folder / "raw_scan_hz", 10)
    for k, joules in enumerate(accelerators):
        put(folder / f"accel{k}_energy", f"{joules:.0f} J 1669374958452345 us")


def rapl(sysfs: Path, zones: dict[str, tuple[str, float]], range_j: float = 65_536.0) -> None:
    """zones: 'intel-rapl:0' -> (its name, joules)."""
    for zone, (name, joules) in zones.items():
        folder = sysfs / "class" / "powercap" / zone
        put(folder / "name", name)
        put(folder / "energy_uj", int(joules * 1e6))
        put(folder / "max_energy_range_uj", int(range_j * 1e6))


def gcd(sysfs: Path, card: int, serial: str, **sensors: object) -> None:
    """One device of AMD's; sensors: as power1_average=5000000, in microwatts."""
    device = sysfs / "class" / "drm" / f"card{card}" / "device"
    put(device / "serial_number", serial)
    for name, value in sensors.items():
        put(device / "hwmon" / f"hwmon{card}" / name, value)
