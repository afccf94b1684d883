"""What a run loads before its first step: ten thousand ranks read all of it from one file system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from small_runs import store

ONE_RUN = """
import sys
from hpcllm.cli.main import main

code = main(["train", "run.toml"]) or main(["generate", "runs/tiny/checkpoints/step_00000002.h5", "--prompt", "sum"])
sys.exit(code or sorted(sys.modules.keys() & {"torch._dynamo", "torch._inductor", "sympy"}) or 0)
"""
RUN_FILE = """
run = {{ name = "tiny", steps = 2 }}
model = {{ layers = 1, hidden = 32, heads = 2, ffn = 32 }}
data = {{ store = {store!r}, sequence_length = 16, global_batch = 2 }}
"""


@pytest.mark.full(reason="a run in a process of its own; a quarter of a minute")
def test_a_run_loads_no_compiler_that_it_does_not_use(tmp_path):
    """PyTorch's takes two seconds of a core on each rank, and 800 files; innocent calls load it."""
    (tmp_path / "run.toml").write_text(RUN_FILE.format(store=str(store())))
    done = subprocess.run([sys.executable, "-c", ONE_RUN], cwd=tmp_path, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
