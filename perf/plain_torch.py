"""The loop that one would write without us: PyTorch, on one rank or over gloo with a library's model around ours.

Same weights, samples, AdamW and clipping as `python -m hpcllm train` with the same run file and overrides, and the same
model, so that a figure beside ours compares like with like. Every rank of MPI.COMM_WORLD takes part.

    python perf/plain_torch.py RUN_FILE HOOK STEPS [--set KEY=VALUE]      rank 0 prints a line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch_parallel
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy
from torch_parallel import Peer

from hpcllm.config import schema as configs
from hpcllm.config.schema import Config, OptimizerConfig
from hpcllm.data.packing import SplitArrays, make_rows, read_samples
from hpcllm.data.sampler import Sampler
from hpcllm.data.store import open_store
from hpcllm.model.initialisation import build
from hpcllm.model.shapes import split_layers
from hpcllm.model.transformer import Decoder
from hpcllm.optim.adamw import learning_rate


def _picotron(name: str, decoder: Decoder, config: Config) -> Peer:
    import picotron_model  # which needs picotron's folder on PYTHONPATH

    return picotron_model.parallel(name, decoder, config.model, config.data.sequence_length)


def _of_torch(make: Callable[..., Peer], decoder: Decoder, _: Config) -> Peer:
    return make(decoder)


PEERS: dict[str, Callable[[Decoder, Config], Peer]] = {  # by hook; described where they are made
    "": partial(_of_torch, torch_parallel.alone),
    "fp32": partial(_of_torch, torch_parallel.ddp),
    "fp16": partial(_of_torch, partial(torch_parallel.ddp, fp16=True)),
    "fsdp": partial(_of_torch, torch_parallel.fsdp),
    "fsdp-once": partial(_of_torch, partial(torch_parallel.fsdp, gathered_once=True)),
    "tp": partial(_of_torch, torch_parallel.tensor_parallel),
    "picotron-dp": partial(_picotron, "dp"),
    "picotron-tp": partial(_picotron, "tp"),
}


@dataclass
class PlainRun:
    seconds: list[float]  # of each step
    losses: list[float]  # of each step, this replica's


def plain_loop(run_file: Path, settings: Sequence[str], steps: int, hook: str = "") -> PlainRun:
    """Train from initial weights. settings: as --set takes them. Collective over the world with a hook."""
    run = PlainRun([], [])
    for seconds, loss in plain_steps(run_file, settings, steps, hook):
        run.seconds.append(seconds)
        run.losses.append(loss)
    return run


def plain_steps(
    run_file: Path, settings: Sequence[str], steps: int, hook: str = "", compiled: bool = False
) -> Iterator[tuple[float, float]]:
    """Yield the seconds and the loss of each step. compiled: model and loss by torch.compile, as one graph."""
    config, store = open_store(configs.load(run_file, settings), MPI.COMM_WORLD)
    data = config.data
    rows = make_rows(SplitArrays.of(store, "train"), data.sequence_length, "stream", masked=False)
    sampler = Sampler(rows.count, config.run.seed)
    peer = PEERS[hook](build(config.model, split_layers(config.model, 1)[0], config.run.seed), config)
    share = data.global_batch // peer.replicas
    first = share * (MPI.COMM_WORLD.rank if peer.replicas > 1 else 0)
    adamw = _adamw(peer.model, config.optimizer)
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    for step in range(steps):
        start = time.perf_counter()
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, config.run.steps, config.optimizer)
        inputs, targets, _ = torch.from_numpy(
            read_samples(rows, sampler, step * data.global_batch + first, share).planes
        )
        with peer.passes():
            loss = loss_of(peer.model, inputs, targets)
            adamw.zero_grad(set_to_none=not peer.keeps_gradients)
            loss.backward()
        peer.clip(config.optimizer.clip_norm)
        adamw.step()
        peer.end_step()
        yield time.perf_counter() - start, loss.item()


def _loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _adamw(model: nn.Module, optimizer: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon, fused=True)


def leave() -> None:
    """End the process: gloo's own end hangs now and then, where one rank is gone before the other. Collective."""
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("hook", choices=PEERS)
    parser.add_argument("steps", type=int)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    run = plain_loop(arguments.run_file, arguments.set, arguments.steps, arguments.hook)
    of_ranks = MPI.COMM_WORLD.gather(run.losses)
    if of_ranks:  # replicas have equal shares of the batch, so the mean of theirs is that of all
        run.losses = [sum(losses) / len(losses) for losses in zip(*of_ranks, strict=True)]
        print(json.dumps(asdict(run)), flush=True)
    leave()


if __name__ == "__main__":
    main()
