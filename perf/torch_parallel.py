"""PyTorch's own ways to train our decoder on several ranks: DDP, FSDP2 and tensor parallelism, over gloo.

    name         replicas   what a rank holds
    fp32, fp16   each rank  everything: DistributedDataParallel, gradients as they are / with fp16_compress_hook
    fsdp         each rank  its shard; a block's weights are gathered for each of its passes (reshard_after_forward)
    fsdp-once    each rank  its shard; weights are gathered in the forward pass and stay until the backward pass
    tp           one        its columns or rows of each linear layer, its part of the vocabulary

Each is set up as its documents advise. Where they leave a choice it is the faster one: FSDP2 has a unit a block,
tensor parallelism one sum of input gradients for all layers that read the same tensor, and logits that never travel.
The norm of sharded gradients is one sum over local shards, in place of clip_grad_norm_'s operations on each tensor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from hpcllm.model.attention import Angles, Attention, causal_attention, rotated_pair
from hpcllm.model.transformer import Block, Decoder, FeedForward, normed


@dataclass
class Peer:
    """A model on one rank, and what its training loop has to do beside calling it."""

    model: nn.Module  # tokens (B, T) -> logits (B, T, V)
    clip: Callable[[float], object]  # limits the norm of the gradients, that over all ranks
    replicas: int = 1  # ranks that share the batch, in equal parts
    keeps_gradients: bool = False  # their memory belongs to buckets
    passes: Callable[[], AbstractContextManager[object]] = nullcontext  # entered for forward and backward pass
    end_step: Callable[[], object] = lambda: None  # called after the update


def open_gloo() -> None:
    """Let the ranks meet at MASTER_ADDR if there is one, else through a file, on the loopback device."""
    world = MPI.COMM_WORLD
    if dist.is_initialized():
        return
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=world.rank, world_size=world.size)


def alone(decoder: Decoder) -> Peer:
    """Take the decoder as it is, on one rank."""
    return Peer(decoder, clip_whole(decoder))


def ddp(decoder: Decoder, fp16: bool = False) -> Peer:
    """Let DistributedDataParallel sum the gradients. Collective over all ranks."""
    open_gloo()
    model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    if fp16:
        model.register_comm_hook(None, fp16_compress_hook)
    return Peer(model, clip_whole(decoder), dist.get_world_size(), keeps_gradients=True)


def fsdp(decoder: Decoder, gathered_once: bool = False) -> Peer:
    """Let FSDP2 shard parameters, gradients and states. Collective over all ranks."""
    from torch.distributed.fsdp import fully_shard  # seconds, which only who shards shall wait for

    open_gloo()
    for unit in (*decoder.blocks.values(), decoder):
        sharded = fully_shard(unit, reshard_after_forward=False if gathered_once else None)  # None: all but the root
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return Peer(decoder, clip_shards(decoder), dist.get_world_size())


def tensor_parallel(decoder: Decoder) -> Peer:
    """Let parallelize_module split all layers over the ranks. Collective over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    open_gloo()
    columns, rows = styles.ColwiseParallel, styles.RowwiseParallel
    plan = {"embedding": rows(input_layouts=Replicate())}
    plan["head"] = columns(output_layouts=Shard(-1), use_local_output=False)
    for number in decoder.blocks:
        block, whole = f"blocks.{number}", Replicate()
        plan |= {f"{block}.attention.{name}": columns() for name in ("query", "key", "value")}
        plan |= {f"{block}.ffn.{name}": columns() for name in ("gate", "up")}
        plan |= {f"{block}.attention.output": rows(), f"{block}.ffn.down": rows()}
        # made a DTensor once for all layers that read it: their input gradients are added before they are summed
        plan[f"{block}.attention"] = styles.PrepareModuleInput(
            input_layouts=(whole, None), desired_input_layouts=(whole, None)
        )
        plan[f"{block}.ffn"] = styles.PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    model = styles.parallelize_module(CalledDecoder(decoder), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return Peer(model, clip_shards(model), passes=styles.loss_parallel)


class CalledDecoder(nn.Module):
    """Our decoder with each linear layer called as a module, by which DTensor's hooks come in; not for tied tables.

    The modules with parameters are the decoder's own, and so are the functions between them.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        assert not decoder.model.tied, "a table that is embedding and head would be split twice"
        self.embedding, self.final_norm, self.head = decoder.embedding, decoder.final_norm, decoder.head
        self.blocks = nn.ModuleDict({number: CalledBlock(block) for number, block in decoder.blocks.items()})
        self.table = decoder.table

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.embedding(tokens), Angles(self.table[:, : tokens.shape[1]])
        for block in self.blocks.values():
            x = block(x, angles)
        return self.head(normed(self.final_norm, x).value())


class CalledBlock(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = block.attention_norm, block.ffn_norm
        self.attention, self.ffn = CalledAttention(block.attention), CalledFeedForward(block.ffn)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        x = x + self.attention(normed(self.attention_norm, x).value(), angles)
        return x + self.ffn(normed(self.ffn_norm, x).value())


class CalledAttention(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.query, self.key, self.value = attention.query, attention.key, attention.value
        self.output, self.head_dim, self.window = attention.output, attention.head_dim, attention.window

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.query, self.key, self.value))
        return self.output(causal_attention(*rotated_pair(q, k, angles), v, self.window).flatten(-2))


class CalledFeedForward(nn.Module):
    def __init__(self, ffn: FeedForward) -> None:
        super().__init__()
        self.gate, self.up, self.down = ffn.gate, ffn.up, ffn.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def clip_whole(model: nn.Module) -> Callable[[float], object]:
    """Return PyTorch's own clipping, for ranks that have all gradients."""
    return lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit)


def is_dtensor_shard(parameter: nn.Parameter) -> bool:
    """True if a rank has its part of the gradient alone. Of an embedding that is split DTensor makes all of it."""
    return hasattr(parameter.grad, "placements") and any(place.is_shard() for place in parameter.grad.placements)


def clip_shards(
    model: nn.Module, is_shard: Callable[[nn.Parameter], bool] = is_dtensor_shard
) -> Callable[[float], object]:
    """Return a clipping for ranks that have shards of some gradients, and all of the others. Collective to call."""

    def clip(limit: float) -> None:
        shards, whole = (_gradients(p for p in model.parameters() if is_shard(p) == wanted) for wanted in (True, False))
        squares = _squares(shards)
        dist.all_reduce(squares)
        norm = (squares + _squares(whole)).sqrt()
        torch._foreach_mul_(shards + whole, torch.clamp(limit / (norm + 1e-6), max=1.0))  # as clip_grad_norm_ has it

    return clip


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """What this rank has of each gradient, without DTensor around it."""
    return [g.to_local() if hasattr(g, "to_local") else g for p in parameters if (g := p.grad) is not None]


def _squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else torch.zeros(())
