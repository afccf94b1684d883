"""A PyTorch device for tests where there is no GPU: see device.cpp. `start()` once a process, before any MPI message.

    import pretend
    pretend.start()            # "sealed": its addresses kill whoever reads them; start(open_=True): MPI may read them
    x = torch.zeros(4, device="pretend")
    pretend.watch()            # threads and messages, too: threads.py, messages.py; without a device messages alone
    pretend.take_faults()

Compiled once by g++ into a folder that is named by a hash of the source; about a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

SOURCE_NAMES = ("device.cpp", "streams.h", "counts.h", "memory.h", "late.h", "order.h", "sites.h")
SOURCES = [Path(__file__).parent / name for name in SOURCE_NAMES]
NAME = "hpcllm_pretend_device"
_started: dict[str, Any] = {}


def why_not() -> str:
    """What is missing; nothing where the device can be made."""
    if sys.platform != "linux":
        return "the pretend device needs Linux"
    return "" if shutil.which("g++") else "the pretend device needs g++"


def seed() -> int:
    """The seed of all that happens by chance, here and in messages.py: HPCLLM_PRETEND_SEED, else 1."""
    return int(os.environ.get("HPCLLM_PRETEND_SEED", "1"))


def start(open_: bool = False) -> None:
    """Register the device "pretend"; a second call does nothing. open_: the CPU, and MPI, may read its addresses."""
    if _started:
        assert _started["open"] is open_, "one process, one mode"
        return
    spec = importlib.util.spec_from_file_location(NAME, _built())
    assert spec
    assert spec.loader
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    native.start(open_, seed())
    backend_registration.rename_privateuse1_backend("pretend")
    register: Any = torch._register_device_module  # without types in some builds
    register("pretend", _module(native))
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    _started.update(open=open_, native=native)


def is_open() -> bool:
    """Tell if MPI may read the addresses of the device, which has been started."""
    return bool(_started["open"])


def native() -> Any:
    """now_bytes(), peak_bytes(), reset_peak(), behind(address) -> where values are.

    take_faults() -> races since the last call (order.h); take_counts(): see counts.py; what else tests tell it of is in
    messages.py and threads.py.
    """
    return _started["native"]


def watch() -> None:
    """Watch the threads and messages of this process from now on; a second call does nothing.

    Call it before anything takes `wait` from concurrent.futures, or a communicator of the world's from mpi4py.
    """
    if "watched" in _started:
        return
    _started["watched"] = True
    if device := _started.get("native"):
        from pretend import threads

        threads.watch(device)
    if "mpi4py.MPI" in sys.modules:
        _watch_messages()
    else:  # to import it is to start MPI, which not every process wants
        sys.meta_path.insert(0, _FirstImport())


def take_faults() -> list[str]:
    """Races and broken messages since the last call, each with both of its sides, for people."""
    found: list[str] = _started["native"].take_faults() if "native" in _started else []
    if "pretend.messages" in sys.modules:
        told = sys.modules["pretend.messages"].faults
        found += told
        told.clear()
    return found


class _FirstImport:
    """A finder of modules that has messages watched once mpi4py.MPI is there."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.loader
        execute = spec.loader.exec_module

        def execute_and_watch(module: types.ModuleType) -> None:
            execute(module)
            sys.modules.setdefault(name, module)
            sys.modules["mpi4py"].MPI = module  # type: ignore[attr-defined]  # as the import does a moment later
            _watch_messages()

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch_messages() -> None:
    from pretend import messages

    messages.watch(_started.get("native"))


def _module(native: Any) -> types.ModuleType:
    module = types.ModuleType("torch.pretend")
    known = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda _=None: torch.accelerator.synchronize(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda _: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "max_memory_allocated": lambda _=None: native.peak_bytes(),
        "memory_allocated": lambda _=None: native.now_bytes(),
        "reset_peak_memory_stats": lambda _=None: native.reset_peak(),
    }
    for name, function in known.items():
        setattr(module, name, function)
    return module


def _built() -> Path:
    from torch.utils.cpp_extension import include_paths, library_paths

    text = b"".join(source.read_bytes() for source in SOURCES) + torch.__version__.encode() + sys.version.encode()
    folder = Path(tempfile.gettempdir()) / f"hpcllm-pretend-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{NAME}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            aside = target.with_suffix(".tmp")
            includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
            libraries = [word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
            command = [
                "g++",
                "-O1",
                "-std=c++20",
                "-fPIC",
                "-shared",
                f"-DTORCH_EXTENSION_NAME={NAME}",
                str(SOURCES[0]),
            ]
            links = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(aside)]
            subprocess.run([*command, *includes, *libraries, *links], check=True, timeout=600)
            aside.rename(target)
    return target
