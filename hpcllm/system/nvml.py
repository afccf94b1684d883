"""Calls of NVIDIA's driver library, NVML, which comes with the driver; nothing is installed for it.

    python --ctypes--> libnvidia-ml.so.1     nvmlDeviceGetHandleByIndex_v2, .. ByPciBusId_v2 --> a device --> its values

Source: NVML API reference, "Device Queries"; compute modes: nvmlComputeMode_t.
"""

from __future__ import annotations

import ctypes

NVML_LIBRARY = "libnvidia-ml.so.1"
EXCLUSIVE_PROCESS = 3  # one process at a time may have a context on the device
NvmlDevice = ctypes.c_void_p


class NvmlError(OSError):
    """A function of the library failed."""


def nvml_call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call a function of NVML. Raises NvmlError, and AttributeError where the library has no such function."""
    code = getattr(nvml, function)(*arguments)
    if code:
        raise NvmlError(f"{function} gave error {code}")


def nvml_devices(nvml: ctypes.CDLL) -> list[NvmlDevice]:
    """Return all devices of the node. Raises as nvml_call."""
    nvml_call(nvml, "nvmlInit_v2")
    count = ctypes.c_uint()
    nvml_call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    devices = []
    for index in range(count.value):
        device = NvmlDevice()
        nvml_call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        devices.append(device)
    return devices


def takes_one_process(address: str, library: str = NVML_LIBRARY) -> bool:
    """True if the device at this PCI address is in the mode EXCLUSIVE_PROCESS; false where no driver says so."""
    device, mode = NvmlDevice(), ctypes.c_uint()
    try:
        nvml = ctypes.CDLL(library)
        nvml_call(nvml, "nvmlInit_v2")
        nvml_call(nvml, "nvmlDeviceGetHandleByPciBusId_v2", address.encode(), ctypes.byref(device))
        nvml_call(nvml, "nvmlDeviceGetComputeMode", device, ctypes.byref(mode))
    except (OSError, AttributeError):
        return False
    return mode.value == EXCLUSIVE_PROCESS
