"""Sources of energy: where a node tells the joules that it has drawn, what they cover, and how they are read.

Cray and HPE nodes: the whole node, as the board measures it, ten times a second. The files are read between two reads
of `freshness`: equal values mean that all files are of one moment.

    /sys/cray/pm_counters/energy            '184326783 J 1669374958452345 us'     all of the node, accelerators included
                          accel0_energy     of one accelerator (an MI250X: both GCDs), where there are any
                          freshness         another number each time the files were written anew

NVIDIA GPUs: each device since its driver was loaded, from the driver's own library (NVML). All devices of the node that
this process may see are counted: on a node that is shared with other jobs, theirs too.

    libnvidia-ml.so.1     nvmlDeviceGetTotalEnergyConsumption    millijoules, from Volta on
                          nvmlDeviceGetPowerUsage                milliwatts: for a node where some device has no count

AMD GPUs without a Cray board: watts of each package, from the kernel's driver. An MI250X is two devices in one package
with one sensor: the second GCD says 0, or nothing, or what the first says. Devices of one serial number are therefore
counted once, as the one that says most.

    /sys/class/drm/card3/device/hwmon/hwmon7/energy1_input     microjoules so far, where a driver counts
                                             power1_average    microwatts, else
                                             power1_input      microwatts, newer chips
                               /serial_number                  of the package: equal for both GCDs of an MI250X

CPUs alone: packages and their memory (RAPL), counted by the chip. A counter begins anew at max_energy_range_uj, on a
busy package after some minutes. Since CVE-2020-8694 only root may read it, unless a site allows more.

    /sys/class/powercap/intel-rapl:0/        name package-0    energy_uj, max_energy_range_uj        counted
                        intel-rapl:0:0/      core              a part of its package                 not
                        intel-rapl:0:1/      dram              beside its package                    counted
                        intel-rapl:1/        psys              all of the board, packages included   not

Sources: "User Access to Compute Node Power Data", HPE Cray System Management documentation; NVML API reference, "Device
Queries"; Linux, Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst, Documentation/power/powercap/powercap.rst
(AMD's CPUs since Zen, too); LLNL/variorum#553; LUMI-AI-Guide, chapter 6.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcllm.system.nvml import NVML_LIBRARY, NvmlDevice, NvmlError, nvml_call, nvml_devices

SYSFS = Path("/sys")
MICRO, MILLI = 1e-6, 1e-3
POWER_TICK_S = 0.5  # between two reads of watts: sensors average over about as long
RAPL_TICK_S = 20.0  # 65 kJ, the smallest range, last 65 s at 1 kW
CRAY_TRIES = 5  # a read takes microseconds, the files are written ten times a second
HWMON_POWER = ("power1_average", "power1_input")
SCOPES = {  # what is measured, for people
    "pm_counters": "whole nodes",
    "nvml": "GPUs only",
    "hwmon": "GPUs only",
    "rapl": "CPUs only",
}
Packages = list[list[Path]]  # the sensors of each


class MissingSourceError(Exception):
    """This node has no such source, or it cannot be read; the message says why. is_there: it has one."""

    def __init__(self, why: str, is_there: bool = False) -> None:
        super().__init__(why)
        self.is_there = is_there


@dataclass(frozen=True)
class Source:
    """Counters of one node; meter.py makes a number of joules of them.

    read: joules of each counter, now. Raises OSError or ValueError once that is no longer possible.
    """

    name: str  # as in energy.source
    read: Callable[[], Sequence[float]]
    counted: tuple[int, ...]  # which counters add up to what is measured
    of_devices: tuple[int, ...] = ()  # which counters are the part of it that GPUs drew, where that is known
    wraps_at_j: tuple[float, ...] = ()  # where each counter begins anew; (): nowhere
    tick_s: float | None = None  # read at least so often, whatever the training does; None: no need
    fresh_s: float = 0.1  # younger than that, a reading is as good as a new one

    def range_j(self, counter: int) -> float:
        return self.wraps_at_j[counter] if self.wraps_at_j else math.inf


def find_source(wanted: str, on_gpus: bool, sysfs: Path | None = None) -> Source:
    """Return the source of that name; of "auto" the first that this node has. sysfs: None for the machine's.

    Raises MissingSourceError with all reasons.
    """
    found = []
    for name, find in FINDERS.items():
        if name == wanted or (wanted == "auto" and (on_gpus or name not in GPU_SOURCES)):
            try:
                return find(sysfs or SYSFS)
            except MissingSourceError as error:
                found.append((name, error))
    there = [(name, error) for name, error in found if error.is_there]
    raise MissingSourceError("; ".join(f"{name}: {error}" for name, error in there or found), bool(there))


@dataclass
class PowerIntegral:
    """Joules of several sensors since the first read, from their watts. clock: in seconds.

    watts |      .--.            joules so far = area: between two reads, the mean of both times the time
          |  .--'    '--.
          +--|---|---|---|--> s
    """

    watts: Callable[[], Sequence[float]]
    clock: Callable[[], float] = time.monotonic
    _joules: list[float] = field(default_factory=list)
    _last: tuple[float, Sequence[float]] | None = None

    def read(self) -> list[float]:
        """Read the watts once more and return the joules so far. Raises the errors of `watts`."""
        now_s, watts = self.clock(), self.watts()
        before_s, before = self._last or (now_s, watts)
        joules = self._joules or [0.0] * len(watts)
        gained = [(now_s - before_s) * (old + new) / 2 for old, new in zip(before, watts, strict=True)]
        self._joules = [total + more for total, more in zip(joules, gained, strict=True)]
        self._last = now_s, watts
        return list(self._joules)


def find_cray(sysfs: Path) -> Source:
    """Return the counters of a Cray board. Raises MissingSourceError."""
    folder = sysfs / "cray" / "pm_counters"
    if not (folder / "energy").exists():
        raise MissingSourceError(f"no {folder / 'energy'}")
    files = [folder / "energy", *sorted(folder.glob("accel*_energy"))]
    try:
        _read_cray(folder, files)
    except (OSError, ValueError) as error:
        raise MissingSourceError(f"{folder} cannot be read: {error}", is_there=True) from error
    devices = tuple(range(1, len(files)))
    return Source("pm_counters", lambda: _read_cray(folder, files), (0,), devices)


def _read_cray(folder: Path, files: list[Path]) -> list[float]:
    """Return the joules in each of the files, of one moment if the board allows that."""
    freshness = _freshness(folder)
    for _ in range(CRAY_TRIES):
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


def find_nvml(_: Path, library: str = NVML_LIBRARY) -> Source:
    """Return the counters of NVIDIA's driver. Raises MissingSourceError."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise MissingSourceError(f"no {library}: no NVIDIA driver here") from error
    try:
        return _nvml_source(nvml, nvml_devices(nvml))
    except (NvmlError, AttributeError) as error:  # a library without such a function
        raise MissingSourceError(f"{library}: {error}") from error


def _nvml_source(nvml: ctypes.CDLL, devices: list[NvmlDevice]) -> Source:
    """Return a source by joules where all devices count them, else by watts. Raises NvmlError."""
    if not devices:
        raise NvmlError("it knows no device")
    every = tuple(range(len(devices)))
    joules = _nvml_reader(nvml, "nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, devices)
    try:
        joules()
    except (NvmlError, AttributeError):
        watts = _nvml_reader(nvml, "nvmlDeviceGetPowerUsage", ctypes.c_uint, devices)
        watts()
        return _integral("nvml", watts, every)
    return Source("nvml", joules, every, every)


def _nvml_reader(
    nvml: ctypes.CDLL, function: str, kind: type[ctypes._SimpleCData[int]], devices: list[NvmlDevice]
) -> Callable[[], list[float]]:
    """Return a function that reads a number of each device, in joules or watts."""

    def read() -> list[float]:
        values = []
        for device in devices:
            value = kind()
            nvml_call(nvml, function, device, ctypes.byref(value))
            values.append(MILLI * value.value)
        return values

    return read


def find_hwmon(sysfs: Path) -> Source:
    """Return the sensors of AMD's kernel driver. Raises MissingSourceError."""
    folders = sorted((sysfs / "class" / "drm").glob("card*/device/hwmon/hwmon*"))
    counts = _packages(folders, ("energy1_input",))
    packages = counts or _packages(folders, HWMON_POWER)
    if not packages:
        raise MissingSourceError(
            f"no {sysfs}/class/drm/card*/device/hwmon/hwmon*/{{energy1_input,{','.join(HWMON_POWER)}}}"
        )
    every = tuple(range(len(packages)))

    def read() -> list[float]:
        return [max(map(_sensor_value, package)) for package in packages]

    try:
        _check_readable(packages)
    except OSError as error:
        raise MissingSourceError(f"power of the GPUs cannot be read: {error}", is_there=True) from error
    if counts:
        return Source("hwmon", _checked(packages, read), every, every)
    return _integral("hwmon", _checked(packages, read), every)


def _packages(folders: list[Path], names: tuple[str, ...]) -> Packages:
    """Return one sensor a device, those of one serial number together."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        sensor = next((folder / name for name in names if (folder / name).exists()), None)
        if sensor:
            found.setdefault(_serial_number(folder.parent.parent) or str(folder), []).append(sensor)
    return list(found.values())


def _serial_number(device: Path) -> str:
    """Return the serial number; "" where there is none, or all zeros as on boards without one."""
    try:
        return (device / "serial_number").read_text(encoding="ascii", errors="replace").strip().strip("0")
    except OSError:
        return ""


def _sensor_value(sensor: Path) -> float:
    """Return joules or watts; 0 of a GCD that tells nothing, as drivers let its file be unreadable."""
    try:
        return MICRO * number_in(sensor)
    except (OSError, ValueError):
        return 0.0


def _checked(packages: Packages, read: Callable[[], list[float]]) -> Callable[[], list[float]]:
    """Make `read` raise where no sensor can be read: the driver is gone, which is not zero watts."""

    def checked() -> list[float]:
        values = read()
        if not any(values):
            _check_readable(packages)
        return values

    return checked


def _check_readable(packages: Packages) -> None:
    """Raise OSError unless some sensor can be read."""
    failure: Exception = OSError("there is none")
    for sensor in (sensor for package in packages for sensor in package):
        try:
            number_in(sensor)
        except (OSError, ValueError) as error:
            failure = error
        else:
            return
    raise OSError(str(failure)) from failure


def find_rapl(sysfs: Path) -> Source:
    """Return the counters of the CPUs. Raises MissingSourceError."""
    folder = sysfs / "class" / "powercap"
    zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if _is_counted(zone)]
    if not zones:
        raise MissingSourceError(f"no package in {folder}/intel-rapl:*")
    try:
        ranges = tuple(MICRO * number_in(zone / "max_energy_range_uj") for zone in zones)
        _read_rapl(zones)
    except PermissionError as error:
        raise MissingSourceError(
            f"{error.filename} is for root alone (CVE-2020-8694); the site can open it to you", is_there=True
        ) from error
    except (OSError, ValueError) as error:
        raise MissingSourceError(f"{folder} cannot be read: {error}", is_there=True) from error
    counted = tuple(range(len(zones)))
    return Source("rapl", lambda: _read_rapl(zones), counted, wraps_at_j=ranges, tick_s=RAPL_TICK_S)


def _read_rapl(zones: list[Path]) -> list[float]:
    return [MICRO * number_in(zone / "energy_uj") for zone in zones]


def _is_counted(zone: Path) -> bool:
    return _zone_name(zone).startswith("package") if zone.name.count(":") == 1 else _zone_name(zone) == "dram"


def _zone_name(zone: Path) -> str:
    try:
        return (zone / "name").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _integral(name: str, watts: Callable[[], Sequence[float]], every: tuple[int, ...]) -> Source:
    """Return a source of GPUs that tell watts."""
    return Source(name, PowerIntegral(watts).read, every, every, tick_s=POWER_TICK_S, fresh_s=2 * POWER_TICK_S)


def number_in(path: Path) -> float:
    """Read the first word of a file of sysfs: '1234 J 1669374958 us' is 1234. Raises OSError, ValueError."""
    words = path.read_text(encoding="ascii", errors="replace").split()
    if not words:
        raise ValueError(f"{path} is empty")
    return float(words[0])


FINDERS: Mapping[str, Callable[[Path], Source]] = {
    "pm_counters": find_cray,
    "nvml": find_nvml,
    "hwmon": find_hwmon,
    "rapl": find_rapl,
}
GPU_SOURCES = ("nvml", "hwmon")  # tell nothing of a run that computes on CPUs
