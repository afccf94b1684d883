"""A run on a GPU is the run on the CPU, to rounding; one, two and four ranks may share it. And twice the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import small_runs
import torch

from hpcllm.model.initialisation import allocate, build, initialise
from hpcllm.training.setup import open_run
from tests.model.variants import VARIANTS, whole

STEPS = 5
LAYOUTS = {
    1: [{}, {"pipeline": {"microbatches": 3, "recompute": "selective", "loss_tokens": 7}}],
    2: [
        {"optimizer": {"shard": "states"}},
        {"optimizer": {"shard": "all"}},
        {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3, "schedule": "zb-h1"}},
        {"mesh": {"tp": 2, "sequence_parallel": True}},
    ],
    4: [{"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}, "communication": {"gradients": "int8:256"}}],
}


def losses(tables, device: str, compute: str, comm) -> np.ndarray:
    communication = {"bucket_mib": 0.02, "exact_steps": 2, "gpu_aware": "no", **tables.get("communication", {})}
    more = {"run": {"device": device}, "precision": {"compute": compute}, "communication": communication}
    return small_runs.losses(small_runs.tiny(**{**tables, **more}), comm, STEPS)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(("compute", "rtol"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)])
def test_the_losses_are_those_of_the_cpu(comm, device, compute, rtol):  # noqa: ARG001
    for tables in LAYOUTS[comm.size]:
        on_cpu, on_device = (losses(tables, where, compute, comm) for where in ("cpu", "gpu"))
        np.testing.assert_allclose(on_device[:, 0], on_cpu[:, 0], rtol=rtol, err_msg=str(tables))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_same_layout_has_the_same_bits(comm, device, compute):  # noqa: ARG001
    for tables in LAYOUTS[comm.size]:
        one, other = (losses(tables, "gpu", compute, comm) for _ in range(2))
        np.testing.assert_array_equal(one, other, err_msg=str(tables))


def test_fp32_is_fp32(device):
    """TF32 would be off by 2^-11 here."""
    torch.manual_seed(0)
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    got = (x.to(device) @ y.to(device)).double().cpu()
    want = x.double() @ y.double()
    assert ((got - want).norm() / want.norm()).item() < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_initial_weights_have_the_bits_of_the_cpu(device, name):
    model = VARIANTS[name]
    on_cpu, there = build(model, whole(model), seed=3), allocate(model, whole(model), device=device)
    initialise(there, model, seed=3)
    for (key, p), q in zip(on_cpu.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(p, q.cpu()), key


@pytest.mark.parallel([1])
def test_plain_attention_runs_in_a_fused_kernel(comm, device):
    """In bf16, without a window: the flash or another fused kernel, not the scores of all pairs of tokens."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    model = {"hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 176}
    with (
        open_run(small_runs.tiny(model=model, precision={"compute": "bf16"}), comm) as run,
        sdpa_kernel(fused),
    ):
        assert run.device == device
        small_runs.run_steps(run, 1)


STEPS_OF_ITS_OWN = """
import sys
from mpi4py import MPI
import small_runs
table = small_runs.tiny(run={"device": "gpu"}, precision={"compute": sys.argv[1]}, communication={"gpu_aware": "no"})
print(small_runs.losses(table, MPI.COMM_WORLD, 3).tobytes().hex())
"""


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_kernels_that_run_one_by_one_give_the_same_bits(device, compute):  # noqa: ARG001
    """CUDA_LAUNCH_BLOCKING and AMD_SERIALIZE_KERNEL make launches wait: a race of streams gives other bits there."""
    found = set()
    for blocking in ({}, {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3"}):
        command = [sys.executable, "-c", STEPS_OF_ITS_OWN, compute]
        done = subprocess.run(command, env=os.environ | blocking, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("window", [None, 64], ids=["all", "window"])
def test_which_attention_kernel_ran_is_said(device, window, record_property):
    """Into the report of pytest, `--junitxml`: names of kernels differ from one version of PyTorch to the next."""
    q, k, v = (torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    places = torch.arange(256, device=device)
    apart = places[:, None] - places
    mask = None if window is None else (apart >= 0) & (apart < window)
    with torch.profiler.profile() as profile:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=window is None)
        out.sum().backward()
    names = sorted({event.name for event in profile.events() if "attention" in event.name})
    record_property("attention", ", ".join(names))
    assert names
