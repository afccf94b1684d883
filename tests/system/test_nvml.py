"""What NVIDIA's driver says of a device's compute mode, by a library made up of C."""

from __future__ import annotations

import pytest
from c_libraries import compiled

from hpcllm.system.nvml import takes_one_process

NVML = r"""
#include <string.h>
static unsigned modes[2] = {0, 3};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    if (!strcmp(address, "0000:01:00.0")) *device = &modes[0];
    else if (!strcmp(address, "0000:41:00.0")) *device = &modes[1];
    else return 6;
    return 0;
}
#ifndef OLD
int nvmlDeviceGetComputeMode(void *device, unsigned *mode) { *mode = *(unsigned *)device; return 0; }
#endif
"""


@pytest.mark.parametrize("flags", [[], ["-DOLD"]], ids=["driver", "without the call"])
def test_a_device_in_exclusive_mode_takes_one_process(tmp_path, flags):
    library = compiled(tmp_path / "libnvidia-ml.so.1", NVML, flags)
    modes = {f"0000:{bus}:00.0": takes_one_process(f"0000:{bus}:00.0", str(library)) for bus in ("01", "41", "81")}
    assert modes == {"0000:01:00.0": False, "0000:41:00.0": not flags, "0000:81:00.0": False}


def test_without_a_driver_nothing_is_said(tmp_path):
    assert not takes_one_process("0000:01:00.0", str(tmp_path / "libnvidia-ml.so.1"))
