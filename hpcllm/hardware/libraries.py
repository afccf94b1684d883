"""Which MPI libraries this process has loaded, as the kernel maps them."""

from __future__ import annotations


def mpi_libraries() -> list[str]:
    """Paths of the loaded files whose names begin with libmpi, in order; [] where the kernel does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            found = {line[line.index("/") :].strip() for line in lines if "/libmpi" in line}
    except OSError:
        return []
    return sorted(found)
