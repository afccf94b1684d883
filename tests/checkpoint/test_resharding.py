"""Write with one mesh, read with another, up to 8 ranks of each, simulated in one process without MPI.

Every rank's shard specs, optimizer and slabs are the real ones, so are the plans of who owns which block, the file and
its reader. Only messages are not: what a rank would send is copied from its memory to the owner's, or back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_checkpoints import write_slabs

from hpcllm.checkpoint import layout, plan
from hpcllm.checkpoint.layout import STORED_AS, DatasetSpec, as_bytes
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import fill
from hpcllm.checkpoint.slabs import Slab, part_of
from hpcllm.checkpoint.state import Shards, arrays_of
from hpcllm.config.schema import CommunicationConfig, Config, ModelConfig, OptimizerConfig
from hpcllm.model.shapes import parameter_shapes, shard_of, split_layers
from hpcllm.model.tensor_parallel import TensorParallel
from hpcllm.optim.adamw import Share
from hpcllm.optim.flat_buffers import MASTER, Piece
from hpcllm.optim.gpu.fused_adamw import Operands
from hpcllm.optim.optimizer import Optimizer
from hpcllm.optim.shard_spec import Groups, make_shard_specs
from hpcllm.pipeline.actions import Placement

LAYERS = 4
LLAMA = ModelConfig(layers=LAYERS, hidden=12, heads=4, kv_heads=2, ffn=20, vocabulary=31, max_sequence=16)
GPT2 = ModelConfig(
    layers=LAYERS,
    hidden=8,
    heads=4,
    ffn=13,
    vocabulary=29,
    max_sequence=9,
    positions="learned",
    tied=False,
    biases="all",
    norm="layernorm",
    activation="gelu",
)
SHARDS = ["none", "states", "states+gradients", "all"]


@dataclass(frozen=True)
class Layout:
    dp: int
    pp: int
    tp: int
    placement: Placement
    shard: str


def layouts() -> list[Layout]:
    """All meshes of up to 8 ranks, each in one of the ways to cut layers and share state that it allows."""
    found = []
    for dp, pp, tp in itertools.product(range(1, 9), (1, 2, 3, 4), (1, 2, 3, 4)):
        if dp * pp * tp <= 8:
            shards = SHARDS if pp == 1 else SHARDS[:3]
            placements = [Placement(pp), *(Placement(pp, 2, kind) for kind in ("loop", "v") if 2 * pp <= LAYERS)]
            found += [Layout(dp, pp, tp, cut, shard) for cut in placements for shard in shards]
    return found


class Rank:
    """What a rank of a run holds: weights, master weights, moments, all cut as the layout says."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, layout: Layout, rank: int) -> None:
        dp, tp, pp = rank % layout.dp, rank // layout.dp % layout.tp, rank // layout.dp // layout.tp
        placement, shapes = layout.placement, parameter_shapes(model)
        spans = split_layers(model, placement.stages)
        self.names: dict[str, tuple[int, ...]] = {}
        for chunk in range(placement.chunks):
            self.names |= parameter_shapes(model, spans[placement.stage(pp, chunk)])
        ends_apart = placement.home(0)[0] != placement.home(placement.stages - 1)[0]
        shared = "embedding.weight" if model.tied and ends_apart and "embedding.weight" in self.names else None
        self.owned = {name for name in self.names if not (pp > 0 and name == shared)}
        self.shards = Shards(shapes, tp, layout.tp)
        task = {name: torch.zeros(shard_of(name, shapes[name], tp, layout.tp)[1], dtype=dtype) for name in self.names}
        replicas, ends = SimpleNamespace(size=layout.dp, rank=dp, nodes=1), SimpleNamespace(size=2, rank=int(pp > 0))
        specs = make_shard_specs(
            {name: torch.nn.Parameter(values) for name, values in task.items()},
            dict.fromkeys(task, 1),
            shared,
            Config(
                communication=CommunicationConfig(bucket_mib=[200, 5000, 10**6][(layout.dp + layout.tp) % 3] / 2**20),
                optimizer=OptimizerConfig(shard=layout.shard),
            ),
            Groups(replicas, ends),
            TensorParallel(None, tp, layout.tp),
        )
        shares = [
            Share(
                spec,
                torch.zeros(spec.owned, dtype=dtype),
                torch.zeros(spec.owned) if dtype != torch.float32 else None,
                Operands(*(torch.zeros(spec.owned) for _ in range(4))),
                SimpleNamespace(),  # no step is made
            )
            for spec in specs
        ]
        self.optimizer = Optimizer(shares, SimpleNamespace(settle=lambda: None), dp, layout.dp)

    def expected(self, piece: Piece) -> torch.Tensor:
        start, shape = shard_of(piece.name, self.shards.shapes[piece.name], self.shards.rank, self.shards.size)
        whole = values(piece.kind, piece.name, self.shards.shapes[piece.name], piece.values.dtype)
        local = whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]
        return local.reshape(-1)[piece.start : piece.end]

    def fill_as_trained(self) -> None:
        for piece in self.optimizer.pieces_to_read():
            piece.values.copy_(self.expected(piece))

    def forget(self) -> None:
        for piece in self.optimizer.pieces_to_read():
            piece.values.fill_(math.nan)

    def writes(self) -> dict[Slab, torch.Tensor]:
        pieces = self.optimizer.pieces_to_write()
        return self.slabs(p for p in pieces if p.name in self.owned and self.shards.writes(p.name))

    def reads(self) -> dict[Slab, torch.Tensor]:
        return self.slabs(self.optimizer.pieces_to_read())

    def slabs(self, pieces: Iterator[Piece] | Sequence[Piece]) -> dict[Slab, torch.Tensor]:
        return {slab: tensor for piece in pieces for slab, tensor in self.shards.slabs(piece)}

    def has_all(self) -> bool:
        return all(torch.equal(piece.values, self.expected(piece)) for piece in self.optimizer.pieces_to_read())


@cache
def values(kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the whole tensor is; different bits everywhere."""
    generator = torch.Generator().manual_seed(sum(f"{kind}/{name}".encode()) + len(name))
    return torch.randn(shape, generator=generator).to(dtype)


def owners(specs: dict[str, DatasetSpec], held: list[dict], exactly_once: bool) -> list[tuple[plan.BlockTask, ...]]:
    """The blocks of each rank, as the ranks would agree on them."""
    ranks = len(held)
    asked: list[list[plan.Request]] = [[] for _ in held]
    for rank, slabs in enumerate(held):
        used = {name: specs[name] for name in sorted({slab.dataset for slab in slabs})}
        for planner, request in plan.requests(used, list(slabs), rank, ranks):
            asked[planner].append(request)
    told: list[list[plan.BlockTask]] = [[] for _ in held]
    for requests in asked:
        for owner, task in plan.assign_all(requests, exactly_once=exactly_once):
            told[owner].append(task)
    return [plan.in_file_order(task) for task in told]


def gathered(specs: dict[str, DatasetSpec], held: list[dict[Slab, torch.Tensor]]) -> dict[Slab, np.ndarray]:
    """The blocks of a file, put together from what the ranks send to the owners."""
    arrays = [(list(slabs), arrays_of(slabs)) for slabs in held]
    found = {}
    for task in (one for each in owners(specs, held, exactly_once=True) for one in each):
        block = np.empty(task.box.shape, STORED_AS[specs[task.box.dataset].dtype])
        for part in task.parts:
            slabs, array_of = arrays[part.rank]
            slab = slabs[part.number]
            block[part_of(part.box, task.box)] = array_of(slab)[part_of(part.box, slab)]
        found[task.box] = block
    return found


def scattered(checkpoint: Checkpoint, specs: dict[str, DatasetSpec], held: list[dict[Slab, torch.Tensor]]) -> int:
    """Fill what the ranks need from blocks that their owners read; returns how many were read."""
    arrays = [(list(slabs), arrays_of(slabs)) for slabs in held]
    read = [one for each in owners(specs, held, exactly_once=False) for one in each]
    for task in read:
        block = np.empty(task.box.shape, STORED_AS[specs[task.box.dataset].dtype])
        checkpoint.fill_block(task.box.dataset, task.index, as_bytes(block))
        for part in task.parts:
            slabs, array_of = arrays[part.rank]
            slab = slabs[part.number]
            array_of(slab)[part_of(part.box, slab)] = block[part_of(part.box, task.box)]
    return len(read)


@pytest.mark.parametrize("seed", range(12))
def test_any_mesh_reads_what_any_other_wrote(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    wrote, reads = (layouts()[i] for i in rng.integers(len(layouts()), size=2))
    model, dtype = (LLAMA, GPT2)[seed % 2], (torch.float32, torch.bfloat16)[seed // 2 % 2]
    monkeypatch.setattr(layout, "BLOCK_BYTES", int(rng.choice([200, 2000, 1 << 22])))
    kinds = ["model", *([MASTER] if dtype != torch.float32 else []), "optimizer/exp_avg", "optimizer/exp_avg_sq"]
    specs = {
        f"{kind}/{name}": DatasetSpec(shape, str(dtype).removeprefix("torch.") if kind == "model" else "float32")
        for kind in kinds
        for name, shape in parameter_shapes(model).items()
    }
    writers = [Rank(model, dtype, wrote, rank) for rank in range(wrote.dp * wrote.pp * wrote.tp)]
    for rank in writers:
        rank.fill_as_trained()
    file = gathered(specs, [rank.writes() for rank in writers])
    path = write_slabs(tmp_path / "x.h5", None, specs, file, {}).path
    readers = [Rank(model, dtype, reads, rank) for rank in range(reads.dp * reads.pp * reads.tp)]
    for rank in readers:
        rank.forget()
    with Checkpoint.open(path) as checkpoint:
        count = scattered(checkpoint, specs, [rank.reads() for rank in readers])
        assert count == sum(spec.blocks for spec in specs.values())  # each once, whoever needs it
        assert all(rank.has_all() for rank in readers), (wrote, reads)
        alone = readers[len(readers) // 2]
        alone.forget()
        fill(checkpoint, list(alone.reads().items()))
        assert alone.has_all()
