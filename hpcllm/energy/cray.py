"""Cray and HPE nodes: energy of the whole node, as the board measures it, ten times a second.

    /sys/cray/pm_counters/energy            '184326783 J 1669374958452345 us'     all of the node, accelerators included
                          accel0_energy     of one accelerator (an MI250X: both GCDs), where there are any
                          freshness         another number each time the files were written anew

The files are read between two looks at `freshness`: equal looks mean that all values are of one moment.
Source of the format: "User Access to Compute Node Power Data", HPE Cray System Management documentation.
"""

from __future__ import annotations

from pathlib import Path

from hpcllm.energy.source import MissingSourceError, Source, number_in

TRIES = 5  # a read takes microseconds, the files are written ten times a second


def find(sysfs: Path) -> Source:
    """Raises MissingSourceError."""
    folder = sysfs / "cray" / "pm_counters"
    if not (folder / "energy").exists():
        raise MissingSourceError(f"no {folder / 'energy'}")
    files = [folder / "energy", *sorted(folder.glob("accel*_energy"))]
    try:
        _read(folder, files)
    except (OSError, ValueError) as error:
        raise MissingSourceError(f"{folder} cannot be read: {error}", is_there=True) from error
    devices = tuple(range(1, len(files)))
    return Source("pm_counters", lambda: _read(folder, files), (0,), devices)


def _read(folder: Path, files: list[Path]) -> list[float]:
    """Joules in each of the files, of one moment if the board lets us."""
    freshness = _freshness(folder)
    for _ in range(TRIES):
        values = [number_in(path) for path in files]
        before, freshness = freshness, _freshness(folder)
        if freshness == before:
            break
    return values  # at worst of two moments a tenth of a second apart


def _freshness(folder: Path) -> float | None:
    try:
        return number_in(folder / "freshness")
    except FileNotFoundError:
        return None  # an older board: what it says is taken as it is
