"""Ten steps of a run with adapters are ten steps of PEFT's on the same weights and samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from mpi4py import MPI
from small_runs import losses, run_steps
from torch.nn import functional

from hpcllm.checkpoint.huggingface.convert import convert
from hpcllm.checkpoint.huggingface.tensor_map import LLAMA
from hpcllm.model.initialisation import initial_values
from hpcllm.model.shapes import adapter_shapes
from hpcllm.optim.adamw import learning_rate
from tests.training.test_adapter_runs import base, tuned

pytestmark = [  # of PEFT and transformers about each other
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning", "UserWarning")
]
STEPS = 10


def begun(config) -> dict[str, torch.Tensor]:
    fill, found = initial_values(config.model, config.run.seed, adapter=config.finetuning.adapter), {}
    for name, shape in adapter_shapes(config.model, config.finetuning.adapter).items():
        found[name] = torch.empty(shape)
        fill(name, found[name])
    return found


def batches(run) -> list[torch.Tensor]:
    """The tokens of each step, (samples, sequence + 1) int64."""
    rows, share = run.loader.rows, run.config.data.global_batch
    pieces = [rows.pieces(run.loader.sampler.index(at)) for at in range(STEPS * share)]
    assert all(len(each) == 1 for each in pieces)
    samples = [rows.split.tokens[start : start + length + 1].astype(np.int64) for ((start, length, _),) in pieces]
    return list(torch.from_numpy(np.stack(samples)).split(share))


def pefts(peft, folder, config, steps: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Adapters and losses of PEFT's model after the same steps, by our names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    layers = [path.rpartition(".")[2] for layer, path in LLAMA.layers.items() if "norm" not in layer]
    adapter = config.finetuning.adapter
    model = peft.get_peft_model(model, peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=layers))
    tensors = LLAMA.tensor_map(config.model, "model")
    theirs, named = {}, dict(model.named_parameters())
    for name, first in begun(config).items():
        layer, _, kind = name.rpartition(".")
        path = tensors[f"{layer}.weight"].name.removesuffix(".weight")
        theirs[name] = named[f"base_model.model.{path}.lora_{kind[-1].upper()}.default.weight"]
        theirs[name].data.copy_(first)
    options, seen = config.optimizer, []
    betas = (options.beta1, options.beta2)
    optimizer = torch.optim.AdamW(theirs.values(), betas=betas, eps=options.epsilon, weight_decay=options.weight_decay)
    for step, tokens in enumerate(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.run.steps, options)
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.values(), options.clip_norm)
        optimizer.step()
        seen.append(loss.item())
    return {name: weight.detach() for name, weight in theirs.items()}, seen


@pytest.mark.full(reason="a tenth of a minute, where PEFT is installed", in_ci=True)
@pytest.mark.parallel([1, 2, 4])
def test_updates_are_those_of_peft(comm, shared_path):
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    layout = {1: {}, 2: {"tp": 2}, 4: {"tp": 2, "pp": 2}}[comm.size]
    first = base()  # on all ranks
    config = tuned(mesh=layout, data={"document_mask": False}, optimizer={"epsilon": 1e-6})

    def work(run):
        seen = run_steps(run, STEPS)[:, 0]
        slabs = {}
        for piece in run.optimizer.pieces_to_write():
            if piece.kind == "model" and run.shards.writes(piece.name):
                slabs |= {slab: tensor.clone() for slab, tensor in run.shards.slabs(piece)}
        return run.config, seen, slabs, batches(run)

    config, seen, slabs, steps = losses(config, comm, 0, work)
    found = {
        name: torch.full(shape, torch.nan)
        for name, shape in adapter_shapes(config.model, config.finetuning.adapter).items()
    }
    for part in comm.allgather(slabs):
        for slab, tensor in part.items():
            place = tuple(slice(at, at + n) for at, n in zip(slab.start, slab.shape, strict=True))
            found[slab.dataset.removeprefix("model/")][place] = tensor
    if comm.rank == 0:
        convert(first, shared_path / "folder", MPI.COMM_SELF)
        want, want_losses = pefts(peft, shared_path / "folder", config, steps)
        np.testing.assert_allclose(seen, want_losses, rtol=1e-5)
        for name, start in begun(config).items():
            error = torch.linalg.vector_norm(found[name] - want[name])
            assert error <= 1e-5 * torch.linalg.vector_norm(want[name] - start), name
    comm.Barrier()
