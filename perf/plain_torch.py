"""The loop that one would write without us: PyTorch, alone or with DistributedDataParallel over gloo.

Same model, weights, samples, AdamW and clipping as `python -m hpcllm train` with the same run file and overrides, so
that a figure beside ours compares like with like. Every rank of MPI.COMM_WORLD is a replica.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpcllm.config import schema as configs
from hpcllm.config.schema import OptimizerConfig
from hpcllm.data.packing import SplitArrays, make_rows, read_samples
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import open_store
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.optim.adamw import learning_rate

HOOKS = ("", "fp32", "fp16")  # none: without DistributedDataParallel; how its gradients travel


@dataclass
class PlainRun:
    seconds: list[float]  # of each step
    loss: float  # of the last step, this replica's


def plain_loop(run_file: Path, settings: Sequence[str], steps: int, hook: str = "") -> PlainRun:
    """Train from initial weights. settings: as --set takes them. Collective over the world with a hook."""
    run = PlainRun([], 0.0)
    for seconds, loss in plain_steps(run_file, settings, steps, hook):
        run.seconds.append(seconds)
        run.loss = loss
    return run


def plain_steps(
    run_file: Path, settings: Sequence[str], steps: int, hook: str = "", compiled: bool = False
) -> Iterator[tuple[float, float]]:
    """Yield the seconds and the loss of each step. compiled: model and loss by torch.compile, as one graph."""
    config, store = open_store(configs.load(run_file, settings), MPI.COMM_WORLD)
    data = config.data
    rows = make_rows(SplitArrays.of(store, "train"), data.sequence_length, "stream", masked=False)
    rank, share = MPI.COMM_WORLD.rank, data.global_batch // MPI.COMM_WORLD.size
    sampler = Sampler(rows.count, config.run.seed)
    decoder = model = build(config.model, split_layers(config.model, 1)[0], config.run.seed)
    if hook:
        _open_gloo()
        model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
        if hook == "fp16":
            model.register_comm_hook(None, fp16_compress_hook)
    adamw = _adamw(decoder, config.optimizer)
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    for step in range(steps):
        start = time.perf_counter()
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, config.run.steps, config.optimizer)
        position = step * data.global_batch + rank * share
        inputs, targets, _ = torch.from_numpy(read_samples(rows, sampler, position, share).planes)
        loss = loss_of(model, inputs, targets)
        adamw.zero_grad(set_to_none=not hook)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), config.optimizer.clip_norm)
        adamw.step()
        yield time.perf_counter() - start, loss.item()


def _loss(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def leave() -> None:
    """End the process: gloo's own end hangs now and then, where one rank is gone before the other. Collective."""
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    os._exit(0)


def _adamw(decoder: torch.nn.Module, optimizer: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    vectors = [p for p in decoder.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon, fused=True)


def _open_gloo() -> None:
    """Ranks meet at MASTER_ADDR if there is one, else through a file, on the loopback device."""
    world = MPI.COMM_WORLD
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=world.rank, world_size=world.size)
