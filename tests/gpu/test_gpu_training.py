"""A run on a GPU is the run on the CPU, to rounding; one, two and four ranks may share it. And twice the same bits."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import small_runs
import torch

from hpcllm.model.initialisation import allocate, build, initialise
from hpcllm.training.setup import open_run
from tests.model.variants import VARIANTS, whole

STEPS = 2 if os.environ.get("HPCLLM_GPU_DRY") else 5
LAYOUTS = {
    1: [{}, {"pipeline": {"microbatches": 3, "recompute": "selective", "loss_tokens": 7}}],
    2: [
        {},
        {"optimizer": {"shard": "states"}},
        {"optimizer": {"shard": "all"}},
        {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3, "schedule": "zb-h1"}},
        {"mesh": {"tp": 2, "sequence_parallel": True}},
    ],
    4: [{"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}, "communication": {"gradients": "int8:256"}}],
}


def configured(tables, device: str, compute: str = "fp32"):
    communication = {"bucket_mib": 0.02, "exact_steps": 2, "gpu_aware": "no", **tables.get("communication", {})}
    more = {"run": {"device": device}, "precision": {"compute": compute}, "communication": communication}
    return small_runs.tiny(**{**tables, **more})


def losses(tables, device: str, compute: str, comm) -> np.ndarray:
    return small_runs.losses(configured(tables, device, compute), comm, STEPS)


def layout_name(tables) -> str:
    """Text of a layout: 'mesh.pp=2 pipeline.microbatches=3', or 'dp' for one that has replicas alone."""
    return " ".join(f"{kind}.{key}={value}" for kind, table in tables.items() for key, value in table.items()) or "dp"


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(("compute", "rtol"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)])
def test_the_losses_are_those_of_the_cpu(comm, device, compute, rtol):  # noqa: ARG001
    for tables in LAYOUTS[comm.size]:
        on_cpu, on_device = (losses(tables, where, compute, comm) for where in ("cpu", "gpu"))
        np.testing.assert_allclose(on_device[:, 0], on_cpu[:, 0], rtol=rtol, err_msg=str(tables))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_same_layout_has_the_same_bits(comm, device, compute, record_property):  # noqa: ARG001
    """perf/gpu.sh runs this again with launches that wait: a race of streams, of lanes too, gives other bits there."""
    for tables in LAYOUTS[comm.size]:
        one, other = (losses(tables, "gpu", compute, comm) for _ in range(2))
        np.testing.assert_array_equal(one, other, err_msg=str(tables))
        record_property(f"bits of {layout_name(tables)}", hashlib.sha256(one.tobytes()).hexdigest()[:16])


@pytest.mark.parallel([1, 2])
def test_a_step_waits_for_the_device_once(comm, device, host_waits, record_property):  # noqa: ARG001
    """For the loss, the norm and the damage, at its end; but with tp, which reads what MPI is to send."""
    for tables in LAYOUTS[comm.size]:
        with open_run(configured(tables, "gpu"), comm) as context:
            small_runs.run_steps(context, 2)
            with host_waits() as places:
                small_runs.run_steps(context, 1, first=2)
        record_property(f"waits of {layout_name(tables)}", ", ".join(places))
        if "tp" not in tables.get("mesh", {}):
            assert len(places) <= 1, (tables, places)


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


@pytest.mark.parametrize("window", [None, 64], ids=["all", "window"])
def test_which_attention_kernel_ran_is_said(device, window, record_property):
    """In the report of perf/gpu.sh: names of kernels differ from one version of PyTorch to the next."""
    q, k, v = (torch.randn(1, 4, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    places = torch.arange(256, device=device)
    apart = places[:, None] - places
    mask = None if window is None else (apart >= 0) & (apart < window)
    with torch.profiler.profile() as profile:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=window is None)
        out.sum().backward()
    names = attention_kernels(profile)
    record_property(f"attention alone, {'all' if window is None else 'window'}", names)
    assert names


@pytest.mark.parallel([1])
@pytest.mark.parametrize("window", [0, 5], ids=["all", "window"])
def test_which_attention_kernel_a_run_takes_is_said(comm, device, window, record_property):  # noqa: ARG001
    """In bf16, forward and backward, under the determinism that runs have by default."""
    model = {"hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 176, "window": window}
    config = small_runs.tiny(model=model, precision={"compute": "bf16"}, run={"device": "gpu"})
    with open_run(config, comm) as context:
        small_runs.run_steps(context, 1)
        with torch.profiler.profile() as profile:
            small_runs.run_steps(context, 1, first=1)
    names = attention_kernels(profile)
    record_property(f"attention of a run, {'window' if window else 'all'}", names)
    assert names


def attention_kernels(profile: torch.profiler.profile) -> str:
    """Names of operators and kernels of attention that ran: those of CUTLASS and cuDNN do not say the word."""
    words = ("attention", "flash", "fmha", "sdpa")
    return ", ".join(sorted({e.name for e in profile.events() if any(word in e.name.lower() for word in words)}))
