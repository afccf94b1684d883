"""picotron's Llama and its parallelism with our weights, on CPUs: what its train.py puts together, for our loop.

    from                                          taken as it is
    picotron.model                                Llama, with PyTorch's attention (FLASH_ATTEN=0)
    picotron.tensor_parallel.tensor_parallel      apply_tensor_parallel
    picotron.data_parallel.data_parallel          DataParallelBucket

Nothing of picotron is changed. Its model file imports three functions of flash-attn, which is for CUDA alone and which
this path does not call: empty modules stand in for it. Weights are ours, so the losses of a run have to be ours, too.
Its own loop has neither clipping nor, on CPUs, a fused AdamW: with ours it gets both.

picotron (https://github.com/huggingface/picotron) has to be on PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_parallel import Peer, clip_shards, clip_whole, open_gloo

from hpcllm.checkpoint.huggingface.architectures import write_llama
from hpcllm.config.schema import ModelConfig
from hpcllm.model.transformer import Decoder

FLASH_ATTENTION = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}
OUR_NAMES = (  # picotron's, as patterns, and ours
    (r"^decoder_layers", "blocks"),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.attention\.q_proj\.", ".attention.query."),
    (r"\.attention\.k_proj\.", ".attention.key."),
    (r"\.attention\.v_proj\.", ".attention.value."),
    (r"\.attention\.out_proj\.", ".attention.output."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn.\1."),
    (r"^final_proj\.", "head."),
)


def parallel(axis: str, decoder: Decoder, model: ModelConfig, sequence_length: int) -> Peer:
    """Make picotron's model with the decoder's weights, over "dp" or "tp" of all ranks. Collective over all ranks."""
    _prepare_imports()
    import picotron.process_group_manager as groups
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    open_gloo()
    size = dist.get_world_size()
    sizes = {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1} | {f"{axis}_size": size}
    groups.setup_process_group_manager(**sizes)
    llama = Llama(_config(model, sequence_length))
    if axis == "tp":
        llama = apply_tensor_parallel(llama)
    shards = _copy_weights(decoder, llama, dist.get_rank())
    if axis == "tp":
        return Peer(llama, clip_shards(llama, lambda parameter: id(parameter) in shards))
    replica = DataParallelBucket(llama)
    return Peer(replica, clip_whole(replica), size, end_step=replica.reset)


def _prepare_imports() -> None:
    os.environ |= {"FLASH_ATTEN": "0", "CONTEXT_PARALLEL": "0", "DEVICE": "cpu", "DTYPE": "float32"}
    os.environ.setdefault("LOCAL_RANK", "0")
    for path, function in FLASH_ATTENTION.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        setattr(sys.modules[path], function, None)


def _config(model: ModelConfig, sequence_length: int) -> SimpleNamespace:
    """The keys of a llama's config.json, as transformers and picotron name them."""
    assert (model.norm, model.activation, model.positions, model.biases) == ("rmsnorm", "swiglu", "rotary", "none")
    assert not model.tied, "picotron has a table for the embedding and one for the head"
    return SimpleNamespace(**(write_llama(model) | {"max_position_embeddings": sequence_length}))


@torch.no_grad()
def _copy_weights(decoder: Decoder, llama: nn.Module, rank: int) -> set[int]:
    """Set all of picotron's parameters. Returns the ids of those that are shards."""
    ours, shards = dict(decoder.named_parameters()), set()
    for name, parameter in llama.named_parameters():
        weight = ours.pop(_our_name(name))
        if weight.shape != parameter.shape:
            shards.add(id(parameter))
        parameter.copy_(_shard(weight, parameter.shape, rank))
    assert not ours, f"picotron's model has no {', '.join(ours)}"
    return shards


def _our_name(name: str) -> str:
    for pattern, replacement in OUR_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _shard(weight: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """The part of a weight that is this rank's: cut along the dim in which shape is smaller."""
    for dim, length in enumerate(shape):
        if length < weight.shape[dim]:
            weight = weight.narrow(dim, rank * length, length)
    return weight
