"""AMD GPUs without a Cray board: watts of each package, from the kernel's driver.

    /sys/class/drm/card3/device/hwmon/hwmon7/energy1_input     microjoules so far, where a driver counts
                                             power1_average    microwatts, else
                                             power1_input      microwatts, newer chips
                               /serial_number                  of the package: equal for both GCDs of an MI250X

An MI250X is two devices in one package with one sensor: the second GCD says 0, or nothing, or what the first says.
Devices of one serial number are therefore counted once, as the one that says most.
Sources: Linux, Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst; LLNL/variorum#553; LUMI-AI-Guide, chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcllm.energy.power import FRESH_S, TICK_S, Integral
from hpcllm.energy.source import MissingSourceError, Source, number_in

Packages = list[list[Path]]  # the sensors of each
MICRO = 1e-6
POWER = ("power1_average", "power1_input")


def find(sysfs: Path) -> Source:
    """Raises MissingSourceError."""
    folders = sorted((sysfs / "class" / "drm").glob("card*/device/hwmon/hwmon*"))
    counts = _packages(folders, ("energy1_input",))
    packages = counts or _packages(folders, POWER)
    if not packages:
        raise MissingSourceError(f"no {sysfs}/class/drm/card*/device/hwmon/hwmon*/{{energy1_input,{','.join(POWER)}}}")
    every = tuple(range(len(packages)))

    def read() -> list[float]:
        return [max(map(_quietly, package)) for package in packages]

    try:
        _one_speaks(packages)
    except OSError as error:
        raise MissingSourceError(f"power of the GPUs cannot be read: {error}", is_there=True) from error
    if counts:
        return Source("hwmon", _alive(packages, read), every, every)
    integral = Integral(_alive(packages, read))
    return Source("hwmon", integral.read, every, every, tick_s=TICK_S, fresh_s=FRESH_S)


def _packages(folders: list[Path], names: tuple[str, ...]) -> Packages:
    """One sensor a device, those of one serial number together."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        sensor = next((folder / name for name in names if (folder / name).exists()), None)
        if sensor:
            found.setdefault(_serial_number(folder.parent.parent) or str(folder), []).append(sensor)
    return list(found.values())


def _serial_number(device: Path) -> str:
    """Empty where it is not said, or is all zeros as on boards without one."""
    try:
        return (device / "serial_number").read_text(encoding="ascii", errors="replace").strip().strip("0")
    except OSError:
        return ""


def _quietly(sensor: Path) -> float:
    """In joules or watts; 0 from a GCD that does not tell, as drivers let its file be unreadable."""
    try:
        return MICRO * number_in(sensor)
    except (OSError, ValueError):
        return 0.0


def _alive(packages: Packages, read: Callable[[], list[float]]) -> Callable[[], list[float]]:
    """The same, with an error where no sensor can be read: the driver is gone, which is not zero watts."""

    def checked() -> list[float]:
        values = read()
        if not any(values):
            _one_speaks(packages)
        return values

    return checked


def _one_speaks(packages: Packages) -> None:
    """Raises OSError unless some sensor can be read."""
    failure: Exception = OSError("there is none")
    for sensor in (sensor for package in packages for sensor in package):
        try:
            number_in(sensor)
        except (OSError, ValueError) as error:
            failure = error
        else:
            return
    raise OSError(str(failure)) from failure
