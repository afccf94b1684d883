"""A student's file: loaded as a module, with limits on what it may ask for, and what its exceptions say."""

from __future__ import annotations

import importlib.util
import resource
import sys
from pathlib import Path
from types import ModuleType

from mpi4py import MPI

from hpcllm.course.lab import LawError

LARGEST_FILE_BYTES = 1 << 30
MOST_CPU_S = 1200  # of a rank with all its threads; runner.py ends it long before, unless that was killed


def load_file(path: Path) -> ModuleType:
    """Run the student's file as a module; nothing is written beside it."""
    spec = importlib.util.spec_from_file_location("student", path)
    if not spec or not spec.loader:
        raise LawError("missing", f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["student"] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


def borrowed_name(student: ModuleType) -> str:
    """Return a name in the student's file that is a thing of the grader, '' if there is none.

    What a lab hands out lies in its given.py.
    """
    for name, value in vars(student).items():
        source = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if str(source).startswith("hpcllm.course") and not str(source).endswith(".given"):
            return name
    return ""


def hint_of(error: BaseException) -> str:
    """Return the key of the hint for an exception of the student's function."""
    if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
        return "truncated"
    return "exception"


def text_of(error: BaseException) -> str:
    """Return the text of an exception, whose own method may do anything."""
    try:
        return str(error)
    except BaseException:
        return ""


def limit(memory_bytes: int) -> None:
    """Limit what this process may ask for from now on: memory, sizes of files, core dumps, processor time."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now_bytes = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    limits = (
        (resource.RLIMIT_DATA, now_bytes + memory_bytes),
        (resource.RLIMIT_FSIZE, LARGEST_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, MOST_CPU_S),
    )
    for kind, most in limits:
        resource.setrlimit(kind, (most, most))
