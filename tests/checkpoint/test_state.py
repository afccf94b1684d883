"""A run's state written under one (dp, pp, tp), shard level and type comes back under any other, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from pytest_mpi import parallel_assert
from small_checkpoints import write_slabs

from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import read_model, restore, tokenizer_json
from hpcllm.checkpoint.state import RunState, Shards, facts, save
from hpcllm.config.schema import ModelConfig, from_tables, to_tables
from hpcllm.errors import CheckpointError
from hpcllm.model.shapes import parameter_shapes, shard_of, split_layers
from hpcllm.mpi.partition import chunk_range
from hpcllm.optim.flat_buffers import Piece

MODEL = ModelConfig(layers=3, hidden=12, heads=4, ffn=20, vocabulary=31, max_sequence=16, positions="learned")
SHAPES = parameter_shapes(MODEL)
CONFIG = from_tables({"run": {"seed": 17}, "model": {"layers": 3}})
TOKENIZER = '{"model": "größe"}'
MOMENTS = ("optimizer/exp_avg", "optimizer/exp_avg_sq")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MASTER = "optimizer/master"


def values(kind: str, name: str, dtype: torch.dtype = FP32) -> torch.Tensor:
    """What every rank knows the whole tensor to be; /model is the master, rounded to its type."""
    source = "model" if kind == MASTER else kind
    generator = torch.Generator().manual_seed(sum(f"{source}/{name}".encode()))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


class Place:
    """Where a rank stands in a mesh: dp fastest, then tp, then pp."""

    def __init__(self, rank: int, dp: int, tp: int, pp: int) -> None:
        self.dp, self.tp, self.pp = rank % dp, rank // dp % tp, rank // dp // tp
        self.dp_size, self.tp_size, self.pp_size = dp, tp, pp
        self.names = parameter_shapes(MODEL, split_layers(MODEL, pp)[self.pp])
        self.shards = Shards(SHAPES, self.tp, tp)

    def local(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        start, shape = shard_of(name, SHAPES[name], self.tp, self.tp_size)
        return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))].contiguous()

    def pieces(self, kind: str, dtype: torch.dtype, shared: bool) -> Iterator[Piece]:
        """All of this rank's part of a kind; shared: its dp share of a flat bucket over all parameters."""
        whole = {name: self.local(values(kind, name, dtype), name).view(-1) for name in self.names}
        total = sum(t.numel() for t in whole.values())
        first, end = chunk_range(total, self.dp_size, self.dp) if shared else (0, total)
        at = 0
        for name, t in whole.items():
            begin, stop = max(first - at, 0), min(end - at, t.numel())
            if begin < stop:
                yield Piece(kind, name, begin, stop, t[begin:stop])
            at += t.numel()

    def state(self, dtype: torch.dtype) -> RunState:
        kinds = [("model", dtype), *((kind, FP32) for kind in MOMENTS), *([(MASTER, FP32)] if dtype != FP32 else [])]
        return RunState(
            step=12,
            position=384,
            updates=11,
            loss_scale=2.0**15,
            good_steps=7,
            config=to_tables(CONFIG),
            pieces=[piece for kind, kept in kinds for piece in self.pieces(kind, kept, shared=True)],
            shards=self.shards,
            owned=frozenset(n for n in self.names if n != "embedding.weight" or self.pp == 0),
            fingerprint="f0",
            tokenizer_json=TOKENIZER,
            mesh={"dp": self.dp_size, "pp": self.pp_size, "tp": self.tp_size},
        )


def meshes(ranks: int) -> list[tuple[int, int, int]]:
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [m for m in product(sizes, sizes, sizes) if math.prod(m) == ranks and MODEL.heads % m[1] == 0 and m[2] < 4]


def emptied(pieces: Iterator[Piece]) -> list[tuple[Piece, torch.Tensor]]:
    """Pieces whose memory holds nothing yet, with what should come into it."""
    return [(Piece(p.kind, p.name, p.start, p.end, torch.full_like(p.values, float("nan"))), p.values) for p in pieces]


def reads_the_same(checkpoint: Checkpoint, place: Place, dtype: torch.dtype, shared: bool) -> bool:
    """Whether `place` gets what it should: the moments, the master, and of that the model, rounded."""
    kept = [place.pieces("model", dtype, False), *(place.pieces(kind, FP32, shared) for kind in MOMENTS)]
    if dtype != FP32:
        kept.append(place.pieces(MASTER, FP32, shared))
    asked = [pair for pieces in kept for pair in emptied(pieces)]
    known = restore(checkpoint, place.shards, [piece for piece, _ in asked])
    same = (known.step, known.position, known.updates, known.config["run"]["seed"]) == (12, 384, 11, 17)
    same = same and (known.loss_scale, known.good_steps) == (2.0**15, 7)
    return same and from_tables(known.config) == CONFIG and all(torch.equal(p.values, want) for p, want in asked)


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize(("wrote", "reads"), [(FP32, FP32), (FP32, BF16), (BF16, FP32), (BF16, BF16), (BF16, FP16)])
def test_any_layout_and_type_reads_what_any_other_wrote(comm, shared_path, wrote, reads):
    for number, mesh in enumerate(meshes(comm.size)):
        report = save(shared_path / str(number), Place(comm.rank, *mesh).state(wrote), comm)
        with Checkpoint.open(report.path, comm) as checkpoint:
            parallel_assert(tokenizer_json(checkpoint) == TOKENIZER)
            kinds = 3 + (wrote != FP32)
            parallel_assert(len(checkpoint.datasets) == kinds * len(SHAPES) + 1)
            for other, shared in product(meshes(comm.size), (False, True)):
                parallel_assert(reads_the_same(checkpoint, Place(comm.rank, *other), reads, shared))


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_model_alone_is_read_in_shards(comm, shared_path):
    report = save(shared_path, Place(comm.rank, comm.size, 1, 1).state(FP32), comm)
    for _, tp, pp in meshes(comm.size):
        place = Place(comm.rank, comm.size // tp // pp, tp, pp)
        tensors = {}
        for name in place.names:
            start, shape = shard_of(name, SHAPES[name], place.tp, tp)
            tensors[name] = start, torch.full(shape, float("nan"), dtype=BF16)
        with Checkpoint.open(report.path, comm) as checkpoint:
            read_model(checkpoint, SHAPES, tensors)
        same = [torch.equal(t, place.local(values("model", name, BF16), name)) for name, (_, t) in tensors.items()]
        parallel_assert(all(same))


def bytes_written_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process wrote")
@pytest.mark.parallel([1, 2, 3])
def test_replicas_share_the_writing(comm, shared_path):
    """No replica writes more than its share and a block; some room for the tables and for MPI itself."""
    model = ModelConfig(layers=2, hidden=96, heads=3, ffn=1000, vocabulary=3000)
    shapes = parameter_shapes(model)
    total = sum(math.prod(shape) for shape in shapes.values())
    first, end = chunk_range(total, comm.size, comm.rank)
    pieces, at = [], 0
    for name, shape in shapes.items():
        n = math.prod(shape)
        begin, stop = max(first - at, 0), min(end - at, n)
        pieces += [Piece("model", name, begin, stop, torch.zeros(stop - begin))] if begin < stop else []
        at += n
    before = bytes_written_by_this_process()
    state = RunState(
        step=1,
        position=0,
        updates=1,
        config=to_tables(CONFIG),
        pieces=pieces,
        shards=Shards(shapes),
        owned=frozenset(shapes),
        fingerprint="f0",
        tokenizer_json="",
        mesh={},
    )
    report = save(shared_path, state, comm)
    brought = bytes_written_by_this_process() - before
    parallel_assert(report.bytes == 4 * total)
    largest = 4 * max(math.prod(shape) for shape in shapes.values())  # a block here, which one rank writes whole
    parallel_assert(brought <= 4 * (end - first) + largest + (1 << 17))
    parallel_assert(4 * total <= comm.allreduce(brought) <= 4 * total + comm.size * (1 << 17))


def model_pieces(shapes: dict[str, tuple[int, ...]]) -> list[Piece]:
    return [Piece("model", name, 0, math.prod(s), torch.full((math.prod(s),), math.nan)) for name, s in shapes.items()]


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, Place(0, 1, 1, 1).state(FP32), MPI.COMM_SELF).path


def test_a_model_that_does_not_fit_is_told_the_first_differences(saved):
    fewer = {name: shape for name, shape in SHAPES.items() if not name.startswith("blocks.2.")}
    more = SHAPES | {f"blocks.3.{i}": (3,) for i in range(5)}
    other = SHAPES | {"final_norm.weight": (25,)}
    for shapes, message in [
        (fewer, r"blocks\.2\.\S+ is not of this model"),
        (more, r"blocks\.3\.0 is missing; .*blocks\.3\.2 is missing; and 2 more"),
        (other, r"final_norm\.weight has shape \(12,\), not \(25,\)"),
    ]:
        asked = model_pieces(shapes)
        tensors = {p.name: ((0,) * len(shapes[p.name]), p.values.view(shapes[p.name])) for p in asked}
        with Checkpoint.open(saved) as checkpoint:
            with pytest.raises(CheckpointError, match=message):
                restore(checkpoint, Shards(shapes), asked)
            with pytest.raises(CheckpointError, match=message):
                read_model(checkpoint, shapes, tensors)
        assert all(piece.values.isnan().all() for piece in asked)


def test_a_box_that_leaves_its_tensor_is_refused(saved):
    with Checkpoint.open(saved) as checkpoint, pytest.raises(CheckpointError, match=r"final_norm\.weight has shape"):
        read_model(checkpoint, SHAPES, {"final_norm.weight": ((1,), torch.empty(12))})


def test_half_a_master_is_refused(tmp_path):
    state = Place(0, 1, 1, 1).state(BF16)
    lost = [p for p in state.pieces if (p.kind, p.name) != (MASTER, "final_norm.weight")]
    path = save(tmp_path, RunState(**{**vars(state), "pieces": lost}), MPI.COMM_SELF).path
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match=r"master/final_norm\S+ is missing"):
        restore(checkpoint, Shards(SHAPES), model_pieces(SHAPES))


def test_a_file_of_no_run_is_named(tmp_path):
    path = write_slabs(tmp_path / "x.h5", None, {}, {}, {"run/step": 1}).path
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match=r"x\.h5 is not of a training run"):
        facts(checkpoint)


@pytest.mark.parallel([2, 3])
def test_a_fault_of_one_rank_is_known_to_all(comm, shared_path):
    path = save(shared_path, Place(comm.rank, comm.size, 1, 1).state(FP32), comm).path
    shapes = SHAPES | ({"final_norm.weight": (25,)} if comm.rank == 1 else {})
    with Checkpoint.open(path, comm) as checkpoint, pytest.raises(CheckpointError, match=r"rank 1: .*final_norm"):
        restore(checkpoint, Shards(shapes), model_pieces(SHAPES))
