"""What waits for a GPU, tests/gpu and perf/gpu.sh, runs on the pretended device, with emulated kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pretend
import pytest
import torch
from emulated import why_not

from tests.system.test_job import launcher

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "perf"))
import gpu_checks

ROOT = gpu_checks.ROOT
pytestmark = [
    pytest.mark.skipif(bool(why_not() or pretend.why_not()), reason=why_not() or pretend.why_not()),
    pytest.mark.timeout(900),
]
# what is long, or tells of a device alone; arrays of millions of values are not emulated
LONG = "not long_array and not 16_bit_patterns and not (any_values and not (float32 and (int8 or exp)))"

REPORT = """
import sys
import pretend
from emulated import EMULATOR
from hpcllm.codecs.gpu.launch import LAUNCHERS
pretend.start()
LAUNCHERS["pretend"] = lambda: EMULATOR
sys.path.insert(0, "perf")
import gpu, gpu_checks
gpu.ROUNDS, gpu.CALLS, gpu.CODECS = 1, 1, ("bf16", "int8:256", "exp", "zfp:8")
few = gpu_checks.Check(gpu_checks.named(1), 1, "fp32_is_fp32 or (which_attention and window)")
gpu_checks.all_checks = lambda _: [few]
folder = sys.argv[1]
for part in ("checks", "codecs", "summary"):
    sys.argv = ["gpu.py", part, "--folder", folder, "--bytes", "16384"]
    gpu.main()
"""


def dry(command: list[str], notes: Path | str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HPCLLM_GPU_DRY": "pretend",
        "HPCLLM_TEST_OUTCOMES": str(notes),
        "HPCLLM_LAUNCH": shlex.join(launcher(1)[:-1]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=880)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, "fp32_is_fp32 or initial_weights or a_step_waits or which_attention"),
        pytest.param(2, "callers_stream_alone and raw and pinned", marks=pytest.mark.full(reason="half a minute")),
        pytest.param(1, LONG, marks=pytest.mark.full(reason="emulates kernels for some minutes")),
        pytest.param(2, LONG, marks=pytest.mark.full(reason="trains with them for some minutes")),
    ],
)
def test_tests_for_gpus_run_on_the_pretended_device(tmp_path, ranks, names):
    """With the commands of perf/gpu.sh; only what needs an MPI that reads the device is skipped."""
    notes = tmp_path / "outcomes.jsonl"
    check = gpu_checks.Check(gpu_checks.named(ranks), ranks, names)
    done = dry([*launcher(ranks), *gpu_checks.command_of(check, ROOT / "tests" / "gpu")], notes)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = gpu_checks.gathered(map(json.loads, notes.read_text().splitlines()))
    assert found["passed"]
    assert not found["failed"]
    assert set(found["skipped"]) <= {"this MPI does not read device memory"} or ranks == 1, found["skipped"]


def test_waits_that_torch_notes_on_a_device_are_told_from_those_of_lanes_and_from_its_own_remarks(monkeypatch):
    """Under pytest's rule that warnings are errors; torch says once, of the mode itself, that it is a prototype."""
    spec = importlib.util.spec_from_file_location("conftest_of_gpu", ROOT / "tests" / "gpu" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: warnings.warn("a prototype", stacklevel=1))

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    with module._noted_by_torch() as places:
        wait()
        lane = threading.Thread(target=wait)
        lane.start()
        lane.join()
        wait()
    assert [place.partition(":")[0] for place in places] == ["test_dry.py"] * 2


@pytest.mark.full(reason="emulates kernels for a sixth of a minute")
def test_the_report_is_written(tmp_path):
    done = dry([sys.executable, "-c", REPORT, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-2000:]
    records = json.loads((tmp_path / "gpu.json").read_text())["codecs"]
    assert {record["codec"] for record in records} == {"bf16", "int8:256", "exp", "zfp:8"}
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("| int8:256 |") == 2
    assert "| tests/gpu, 1 rank | 0 | 3 | 0 | 0 |" in text
    assert "attention of a run, window: aten::" in text
    assert "- MPI: " in text
