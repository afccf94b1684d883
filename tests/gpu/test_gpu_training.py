"""A run on a GPU is the run on the CPU, to rounding; one, two and four ranks may share it. And twice the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.model.initialisation import allocate, build, initialise
from hpcllm.training.setup import open_run
from tests import small_runs
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
