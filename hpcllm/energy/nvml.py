"""NVIDIA GPUs: energy of each device since its driver was loaded, from the driver's own library (NVML).

    libnvidia-ml.so.1     nvmlDeviceGetTotalEnergyConsumption    millijoules, from Volta on
                          nvmlDeviceGetPowerUsage                milliwatts: for a node where some device has no count

All devices of the node that this process may see are counted: on a node that is shared with other jobs, theirs too.
Source: NVML API reference, "Device Queries".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from hpcllm.energy.power import FRESH_S, TICK_S, Integral
from hpcllm.energy.source import MissingSourceError, Source

LIBRARY = "libnvidia-ml.so.1"
MILLI = 1e-3
Device = ctypes.c_void_p


class NvmlError(OSError):
    """The library did not do what it was asked."""


def find(_: Path, library: str = LIBRARY) -> Source:
    """Raises MissingSourceError."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise MissingSourceError(f"no {library}: no NVIDIA driver here") from error
    try:
        devices = _devices(nvml)
        return _source(nvml, devices)
    except (NvmlError, AttributeError) as error:  # a library without such a function
        raise MissingSourceError(f"{library}: {error}") from error


def _source(nvml: ctypes.CDLL, devices: list[Device]) -> Source:
    """By joules where all devices count them, else by watts. Raises NvmlError."""
    if not devices:
        raise NvmlError("it knows no device")
    every = tuple(range(len(devices)))
    joules = _asker(nvml, "nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, devices)
    try:
        joules()
    except (NvmlError, AttributeError):
        watts = _asker(nvml, "nvmlDeviceGetPowerUsage", ctypes.c_uint, devices)
        watts()
        return Source("nvml", Integral(watts).read, every, every, tick_s=TICK_S, fresh_s=FRESH_S)
    return Source("nvml", joules, every, every)


def _devices(nvml: ctypes.CDLL) -> list[Device]:
    _call(nvml, "nvmlInit_v2")
    count = ctypes.c_uint()
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device = Device()
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        devices.append(device)
    return devices


def _asker(
    nvml: ctypes.CDLL, function: str, kind: type[ctypes._SimpleCData[int]], devices: list[Device]
) -> Callable[[], list[float]]:
    """A function that gives a number of each device, in joules or watts."""

    def ask() -> list[float]:
        values = []
        for device in devices:
            value = kind()
            _call(nvml, function, device, ctypes.byref(value))
            values.append(MILLI * value.value)
        return values

    return ask


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Raises NvmlError, and AttributeError where the library has no such function."""
    code = getattr(nvml, function)(*arguments)
    if code:
        raise NvmlError(f"{function} gave error {code}")
