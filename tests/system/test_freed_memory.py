"""What ranks free stays with the process: long temporaries of an MPI library are not cleared anew by the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import ctypes, resource
from hpcllm.system.job import keep_freed_memory
print(keep_freed_memory())
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
SIZE = 64 << 20
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = c.malloc(SIZE)
    ctypes.memset(place, 1, SIZE)
    c.free(place)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / SIZE)
"""


def share_cleared_again(**variables: str) -> tuple[str, float]:
    """What is said; the share of a temporary's pages that the kernel gives anew when it is allocated a third time."""
    names = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    words, share = done.stdout.splitlines()
    return words, float(share)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_long_temporary_is_given_the_pages_of_the_last_one_unless_the_user_says_otherwise():
    words, share = share_cleared_again()
    assert words == "kept by the process, by mallopt"
    assert share < 0.1
    words, share = share_cleared_again(MALLOC_MMAP_MAX_="65536")
    assert words == "kept or not as MALLOC_MMAP_MAX_ says"
    assert share > 0.001  # a huge page faults once for 512 small ones
