"""The part `checks` of gpu.sh: tests on the device, by number of ranks and under tools, and what they have said.

    ranks 1, 2, 4     tests/gpu, all ranks by HPCLLM_LAUNCH; names of kernels, waits of the host, what MPI can reach
    launches wait     bits of runs on 1 and 2 ranks once more, lanes, pipelines and sharded weights too, each kernel
                      alone on the device: races give other bits
    sanitizers        memcheck of codecs and a training step; shared memory, values that nobody wrote, and barriers,
                      of codecs. Memory comes from the driver, not from PyTorch's pool, in which it has no bounds

Of the sanitizers ROCm has none that takes a program as it is: its AddressSanitizer wants all libraries, PyTorch too,
compiled for it. There the emulator's runs (tests/emulated) stand alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mpi4py
import torch
from mpi4py import MPI

from hpcllm.codecs.gpu.launch import launcher_of
from hpcllm.system.nvml import NVML_LIBRARY, nvml_call

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
RANKS = (1, 2, 4)
WAITING = {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3", "AMD_SERIALIZE_COPY": "3"}
NO_POOL = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
SANITIZER = "compute-sanitizer"
FEW_CODECS = "only_hand_over or wait_once"
SANITIZED = {
    "memcheck": f"{FEW_CODECS} or a_step_waits",
    **dict.fromkeys(("racecheck", "initcheck", "synccheck"), FEW_CODECS),
}
TEST_LIMIT_S = {"": 300, SANITIZER: 1200}  # of a test; tools make kernels 10 to 100 times slower
MISSING = {
    "cuda": f"{SANITIZER} is not on the PATH: module load cuda, or the CUDA toolkit's bin folder",
    "hip": "ROCm has no tool that checks the kernels of a program that was not compiled for it",
}
Launched = Callable[[int, list[str]], list[str]]


@dataclass(frozen=True)
class Check:
    """Tests that are started together."""

    name: str
    ranks: int
    select: str = ""  # of pytest's -k
    environment: dict[str, str] = field(default_factory=dict)
    tool: tuple[str, ...] = ()  # a command in front of Python


def all_checks(sanitizer: str | None) -> list[Check]:
    """sanitizer: path of compute-sanitizer, None where it is not found."""
    return [
        *(Check(named(ranks), ranks) for ranks in RANKS),
        *(Check(f"{named(ranks)}, launches wait", ranks, "same_bits", WAITING) for ranks in RANKS[:2]),
        *(
            Check(f"{SANITIZER}, {tool}", 1, select, NO_POOL, (sanitizer, "--tool", tool, "--error-exitcode=3"))
            for tool, select in (SANITIZED.items() if sanitizer else ())
        ),
    ]


def named(ranks: int) -> str:
    return f"tests/gpu, {ranks} rank{'s' * (ranks > 1)}"


def checks(
    launched: Launched, folder: Path = TESTS / "gpu", which: Iterable[Check] | None = None
) -> list[dict[str, Any]]:
    """Run checks on the tests of a folder: a record of each, and one of each comparison of bits.

    launched(ranks, command): the command of a job. which: None for all.
    """
    sanitizer = shutil.which(SANITIZER)
    records = [_run(check, launched, folder) for check in (all_checks(sanitizer) if which is None else which)]
    records += [compared(records, ranks) for ranks in RANKS[:2]]
    if sanitizer is None:
        records.append(
            {"check": SANITIZER, "exit_code": None, "last_line": MISSING["hip" if torch.version.hip else "cuda"]}
        )
    return records


def command_of(check: Check, folder: Path) -> list[str]:
    """Return the command of one rank."""
    marked = "(not parallel or parallel[1])" if check.ranks == 1 else f"parallel and parallel[{check.ranks}]"
    limit_s = TEST_LIMIT_S[SANITIZER if check.tool else ""]
    pytest = [
        *check.tool,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "ranks",
        "-p",
        "outcomes",
    ]
    selected = ["-k", check.select] if check.select else []
    return [*pytest, "-m", marked, f"--timeout={limit_s}", *selected, str(folder)]


def _run(check: Check, launched: Launched, folder: Path) -> dict[str, Any]:
    print(f"{check.name} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "outcomes.jsonl"
        environment = os.environ | check.environment | {"HPCLLM_TEST_OUTCOMES": str(path)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS), environment.get("PYTHONPATH", "")])
        command = launched(check.ranks, command_of(check, folder))
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    last = next((line for line in reversed(done.stdout.split("\n")) if line.strip()), "")
    return {"check": check.name, "exit_code": done.returncode, "last_line": last, **gathered(map(json.loads, lines))}


def gathered(notes: Iterable[dict[str, str]]) -> dict[str, Any]:
    """Return what the notes of outcomes.py say: of each test the last, an unfinished one among those that failed."""
    outcomes: dict[str, tuple[str, str]] = {}
    facts: dict[str, str] = {}
    warned: Counter[str] = Counter()
    for note in notes:
        if "warning" in note:
            warned[note["warning"].partition("\n")[0]] += 1
        elif "fact" in note:
            facts[f"{_short(note['test'])}: {note['fact']}"] = note["value"]
        elif outcomes.get(note["test"], ("", ""))[0] != "failed":  # a teardown that passes does not undo a failure
            outcomes[note["test"]] = note["outcome"], note["why"]
    failed = {_short(test): why for test, (outcome, why) in outcomes.items() if outcome == "failed"}
    failed |= {_short(test): "did not end" for test, (outcome, _) in outcomes.items() if outcome == "started"}
    skipped = Counter(why for outcome, why in outcomes.values() if outcome == "skipped")
    passed = sum(outcome == "passed" for outcome, _ in outcomes.values())
    return {"passed": passed, "failed": failed, "skipped": dict(skipped), "facts": facts, "warnings": dict(warned)}


def compared(records: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return whether bits of runs are those of the same runs whose launches waited; exit code 1: not, or none were."""
    found = {record["check"]: record["facts"] for record in records}
    free, waited = (found.get(name, {}) for name in (named(ranks), f"{named(ranks)}, launches wait"))
    both = [name for name in free if ": bits of " in name and name in waited]
    other = {
        name: f"{free[name]}, and {waited[name]} where launches wait" for name in both if free[name] != waited[name]
    }
    said = f"{len(both) - len(other)} of {len(both)} runs have the same bits"
    name = f"bits with and without launches that wait, {ranks} rank{'s' * (ranks > 1)}"
    return {"check": name, "exit_code": int(bool(other) or not both), "last_line": said, "failed": other}


def _short(test: str) -> str:
    return test.rpartition("/")[2]


def versions(device: torch.device) -> dict[str, str]:
    """Return what the results depend on beside this code: driver, libraries, MPI."""
    build: Any = torch.version
    found = {
        "system": platform.platform(),
        "driver": driver_version(),
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, CUDA {build.cuda}, ROCm {getattr(build, 'hip', None)}",
        "cuDNN or MIOpen": str(torch.backends.cudnn.version() if device.type == "cuda" else None),
        "CuPy": ", ".join(f"{name} {installed}" for name in CUPY if (installed := _installed(name))) or "none",
        "kernels": launcher_of(device.type)[1] or "compiled here",
        "MPI": MPI.Get_library_version().rstrip("\0 \n").partition("\n")[0],
        "mpi4py": mpi4py.__version__,
        SANITIZER: shutil.which(SANITIZER) or "none",
    }
    return {name: text for name, text in found.items() if text}


CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy")


def driver_version() -> str:
    """Return the version of NVIDIA's driver, else that of AMD's kernel module, else nothing."""
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL(NVML_LIBRARY)
        nvml_call(nvml, "nvmlInit_v2")
        nvml_call(nvml, "nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return f"NVIDIA {text.value.decode()}"
    except (OSError, AttributeError):
        module = Path("/sys/module/amdgpu/version")
        return f"amdgpu {module.read_text().strip()}" if module.exists() else ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
