"""Kernels are tried for this process's device before the first step: compiled and loaded, or PyTorch's and the reason.

CuPy, its compiler and the device's properties are pretended; tests/gpu has the real ones.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.codecs.gpu import compiler as compilation
from hpcllm.codecs.gpu import launch
from hpcllm.codecs.gpu.launch import find_cupy, how_to_install, launcher_of, why_no_cupy, why_no_kernels
from hpcllm.errors import HpcllmError

pytestmark = pytest.mark.usefixtures("forgets")


@pytest.fixture
def forgets(monkeypatch, tmp_path):
    """Every test asks anew, and machine code goes to a folder of its own."""
    monkeypatch.setattr(compilation, "_folder", lambda: str(tmp_path))
    launcher_of.cache_clear()
    yield
    launcher_of.cache_clear()


class Compiler:
    """What CuPy shows of NVRTC or hipRTC. archs: that it knows; a target that it does not is an error."""

    NVRTCError = ValueError

    def __init__(self, version=(12, 8), archs=(75, 80, 90)):
        self.version, self.archs, self.targets = version, archs, []

    def getVersion(self):  # noqa: N802 -- CuPy's names
        return self.version

    def getSupportedArchs(self):  # noqa: N802
        return self.archs

    def createProgram(self, *_):  # noqa: N802
        return 1

    def compileProgram(self, _, options):  # noqa: N802
        self.targets.append(options[0].removeprefix("--gpu-architecture="))

    def getPTX(self, _):  # noqa: N802
        return b"text"

    getCUBIN = getPTX  # noqa: N815

    def destroyProgram(self, _):  # noqa: N802
        pass


def pretend(patch, compiler, device, hip=None, loads=lambda _: None):
    """Let `import cupy` find a pretended one and torch see that device; loads: what the driver does with a file."""
    loaded = []

    class RawModule:
        def __init__(self, path):
            loads(path)
            loaded.append(path)

        def get_function(self, name):
            return name

    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cuda.nvrtc, cuda.runtime = compiler, SimpleNamespace(is_hip=hip is not None)
    cuda.Device = lambda _: contextlib.nullcontext()
    cupy.cuda, cupy.RawModule, cupy.__spec__ = cuda, RawModule, SimpleNamespace(name="cupy")
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setitem(sys.modules, "cupy.cuda", cuda)
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.version, "cuda", None if hip else "12.8")
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    return loaded


architectures = st.sampled_from([50, 60, 70, 75, 80, 86, 90, 100, 103, 120])


@given(own=architectures, archs=st.sets(architectures, min_size=1))
def test_there_are_kernels_where_the_compiler_knows_the_device_or_an_older_one(own, archs):
    """Else the reason is known at the start, and the fix: not in the first step, in which nothing falls back."""
    device = SimpleNamespace(major=own // 10, minor=own % 10)
    compiler = Compiler(archs=tuple(archs))
    with pytest.MonkeyPatch.context() as patch:
        loaded = pretend(patch, compiler, device)
        launcher_of.cache_clear()
        launcher, why = launcher_of("cuda")
    older = [arch for arch in archs if arch <= own]
    assert (launcher is not None) == bool(older) == bool(loaded) == (not why)
    if not older:
        assert f"this device is sm_{own}: use one for an older CUDA" in why
    elif compiler.targets:  # not compiled by an earlier example
        assert compiler.targets == [f"sm_{own}" if own in archs else f"compute_{max(older)}"]


def test_on_rocm_the_target_is_what_the_device_says_with_its_features(monkeypatch):
    compiler = Compiler(version=(7, 0))  # hipRTC's, which is no NVRTC that would be too old
    device = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    loaded = pretend(monkeypatch, compiler, device, hip="7.1.25424")
    launcher, why = launcher_of("cuda")
    assert launcher, why
    assert compiler.targets == ["gfx90a:sramecc+:xnack-"]
    assert len(loaded) == 1


def no_driver(path):
    raise RuntimeError(f"CUDA_ERROR_UNSUPPORTED_PTX_VERSION: {path[-4:]}")


class Failing(Compiler):
    def compileProgram(self, *_):  # noqa: N802
        raise ValueError("unknown target")

    def getProgramLog(self, _):  # noqa: N802
        return "log"


@pytest.mark.parametrize("hip", [None, "7.0.51831"])
@pytest.mark.parametrize(
    ("compiler", "loads", "says"),
    [
        (Compiler(), no_driver, "the driver does not take what CuPy's compiler has made (CUDA_ERROR_UNSUPPORTED"),
        (Failing(), lambda _: None, "kernels of casts.cu with --gpu-architecture="),
    ],
)
def test_what_the_compiler_or_the_driver_rejects_is_known_at_the_start(monkeypatch, compiler, loads, says, hip):
    device = SimpleNamespace(major=9, minor=0, gcnArchName="gfx90a")
    pretend(monkeypatch, compiler, device, hip, loads)
    launcher, why = launcher_of("cuda")
    assert launcher is None
    assert says in why
    assert why == why_no_kernels("cuda")
    assert why_no_kernels("cpu") == ""


@pytest.mark.parametrize(
    ("hip", "cuda", "words"),
    [
        ("7.1.25424-4179531dcd", None, "pip install cupy-rocm-7-0"),
        ("6.4.43484", None, "no package for a PyTorch for ROCm 6.4.43484"),
        (None, "12.8", "pip install cupy-cuda12x"),
        (None, "13.0", "pip install cupy-cuda13x"),
        (None, "11.8", "no package for a PyTorch for CUDA 11.8"),
        (None, None, "no package for a PyTorch for CPUs"),
    ],
)
def test_the_package_to_install_is_that_of_this_torch(monkeypatch, hip, cuda, words):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert words in how_to_install()
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    assert why_no_cupy().startswith("CuPy is not installed; ")
    assert words in why_no_kernels("cuda")


def test_a_cupy_of_another_vendor_and_a_second_runtime_are_named(monkeypatch):
    pretend(monkeypatch, Compiler(), SimpleNamespace(major=9, minor=0))
    assert why_no_cupy() == ""
    monkeypatch.setattr(launch, "hip_runtimes", lambda: ["/opt/rocm/lib/libamdhip64.so.7", "/torch/lib/libamdhip64.so"])
    with pytest.raises(HpcllmError, match=r"a HIP runtime each, /opt/\S+ and /torch/\S+: one has to do"):
        find_cupy()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "devices of different vendors; pip install cupy-rocm-7-0" in why_no_cupy()


def test_hip_runtimes_are_the_files_that_are_mapped(monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    lines = [
        f"7f00-7f01 r-xp 0 08:01 {n} /{path}\n" for n, path in enumerate(("b/libamdhip64.so.7", "a/libamdhip64.so"))
    ]
    others = ["7f02-7f03 rw-p 0 0 0 \n", "7f04 r-xp 0 0 0 /lib/libc.so.6\n"]
    monkeypatch.setattr("builtins.open", lambda *_, **__: maps.open(encoding="utf-8"))
    maps.write_text("".join(others))
    assert launch.hip_runtimes() == []
    maps.write_text("".join([*lines, *lines, *others]))
    assert launch.hip_runtimes() == ["/a/libamdhip64.so", "/b/libamdhip64.so.7"]
