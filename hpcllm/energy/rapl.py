"""CPUs by themselves: energy of packages and of their memory (RAPL), counted by the chip.

    /sys/class/powercap/intel-rapl:0/        name package-0    energy_uj, max_energy_range_uj        counted
                        intel-rapl:0:0/      core              a part of its package                 not
                        intel-rapl:0:1/      dram              beside its package                    counted
                        intel-rapl:1/        psys              all of the board, packages included   not

A counter begins anew at max_energy_range_uj, on a busy package after some minutes: it is read once in TICK_S whatever
the training does. Since CVE-2020-8694 only root may read it, unless a site allows more.
Source: Linux, Documentation/power/powercap/powercap.rst. AMD's chips since Zen speak through the same files.
"""

from __future__ import annotations

from pathlib import Path

from hpcllm.energy.source import MissingSourceError, Source, number_in

MICRO = 1e-6
TICK_S = 20.0  # 65 kJ, the smallest range, last 65 s at 1 kW


def find(sysfs: Path) -> Source:
    """Raises MissingSourceError."""
    folder = sysfs / "class" / "powercap"
    zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _counts(zone)]
    if not zones:
        raise MissingSourceError(f"no package in {folder}/intel-rapl:*")
    try:
        ranges = tuple(MICRO * number_in(zone / "max_energy_range_uj") for zone in zones)
        _read(zones)
    except PermissionError as error:
        raise MissingSourceError(
            f"{error.filename} is for root alone (CVE-2020-8694); the site can open it to you", is_there=True
        ) from error
    except (OSError, ValueError) as error:
        raise MissingSourceError(f"{folder} cannot be read: {error}", is_there=True) from error
    counted = tuple(range(len(zones)))
    return Source("rapl", lambda: _read(zones), counted, wraps_at_j=ranges, tick_s=TICK_S)


def _read(zones: list[Path]) -> list[float]:
    return [MICRO * number_in(zone / "energy_uj") for zone in zones]


def _counts(zone: Path) -> bool:
    return _name(zone).startswith("package") if zone.name.count(":") == 1 else _name(zone) == "dram"


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
