"""Four ranks, each with its part of a folder of `transformers`, read in place, compute its logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.checkpoint.huggingface.folder import read_contents
from hpcllm.checkpoint.huggingface.start import read_weights
from hpcllm.checkpoint.state import Shards
from hpcllm.collectives import group_of
from hpcllm.config.schema import MeshConfig
from hpcllm.model.initialisation import allocate
from hpcllm.model.shapes import parameter_shapes, split_layers
from hpcllm.model.tensor_parallel import tensor_parallel
from hpcllm.mpi.mesh import open_mesh
from hpcllm.optim.flat_buffers import MODEL, Piece

# of which two ranks can share the heads
NAMES = (
    "gpt2", "gpt2 untied, exact gelu", "llama 3, beyond its first length", "llama with biases",
    "mistral, heads of their own width", "qwen2 tied", "qwen2, every layer with a window", "neox",
)  # fmt: skip


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_two_stages_of_two_ranks_are_those_of_transformers(comm, shared_path, name):
    sent = None
    if comm.rank == 0:
        from tests.checkpoint.huggingface import families  # it takes seconds to import

        model = families.make(name)
        model.save_pretrained(shared_path / "theirs", max_shard_size="50KB")
        assert len(list((shared_path / "theirs").glob("*.safetensors"))) > 1
        sent = families.tokens(), families.logits(model, families.tokens())
    tokens, theirs = comm.bcast(sent)
    with open_mesh(comm, MeshConfig(dp=1, pp=2, tp=2)) as mesh, torch.no_grad():
        decoder = part_of(shared_path / "theirs", mesh)
        if mesh.pp.rank == 0:
            mesh.pp.Send(decoder(tokens).numpy(), 1)
            return
        hidden = np.empty((*tokens.shape, decoder.model.hidden), np.float32)
        mesh.pp.Recv(hidden, 0)
        ours = torch.cat(mesh.tp.allgather(decoder(torch.from_numpy(hidden))), dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


def part_of(folder, mesh):
    """This rank's decoder with its part of the weights."""
    model, tp = read_contents(folder).model, tensor_parallel(group_of(mesh.tp))
    decoder = allocate(model, split_layers(model, 2)[mesh.pp.rank], tp)
    pieces = [Piece(MODEL, n, 0, p.numel(), p.data.view(-1)) for n, p in decoder.named_parameters()]
    read_weights(folder, Shards(parameter_shapes(model), tp.rank, tp.size), pieces, mesh.world)
    return decoder
