"""What waits for a GPU, tests/gpu and perf/gpu.sh, runs on the pretended device, with emulated kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pretend
import pytest
from emulated import why_not

pytestmark = pytest.mark.skipif(bool(why_not() or pretend.why_not()), reason=why_not() or pretend.why_not())
ROOT = Path(__file__).parents[3]

START = """
import sys
import pretend
from emulated import EMULATOR
from hpcllm.codecs.gpu.launch import LAUNCHERS
pretend.start()
LAUNCHERS["pretend"] = lambda: EMULATOR
"""

TESTS = (
    START
    + """
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
"""
)

CODECS = (
    START
    + """
sys.path.insert(0, "perf")
import gpu
gpu.ROUNDS, gpu.CALLS, gpu.CODECS = 1, 1, ("bf16", "int8:256", "exp", "zfp:8")
folder = sys.argv[1]
for part in ("checks", "codecs", "summary"):
    sys.argv = ["gpu.py", part, "--folder", folder, "--bytes", "16384"]
    gpu.main()
"""
)


def dry(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HPCLLM_GPU_DRY": "pretend"}  # the device is started by the text, for all tests
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=115)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        pytest.param(
            "test_gpu_codecs.py",
            "only_hand_over or wait_once or (any_values and float32 and (int8 or exp))",
            marks=pytest.mark.full(reason="emulates kernels for half a minute"),
        ),
        ("test_gpu_training.py", "fp32_is_fp32 or initial_weights"),
    ],
)
def test_tests_for_gpus_run_on_the_pretended_device(file, names):
    done = dry(TESTS, f"tests/gpu/{file}", "-k", names)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@pytest.mark.full(reason="emulates kernels for a sixth of a minute")
def test_the_report_is_written(tmp_path):
    done = dry(CODECS, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    records = json.loads((tmp_path / "gpu.json").read_text())["codecs"]
    assert {record["codec"] for record in records} == {"bf16", "int8:256", "exp", "zfp:8"}
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("| int8:256 |") == 2
    assert "| tests/gpu | 0 |" in text
