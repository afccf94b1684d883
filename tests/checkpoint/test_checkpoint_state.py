"""A run's state written under one (dp, pp) comes back to the bit under any other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from pytest_mpi import parallel_assert

from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import RunFacts, facts, restore, tokenizer_json
from hpcllm.checkpoint.state import RunState, save
from hpcllm.checkpoint.writer import write
from hpcllm.config import ModelConfig, from_tables, to_tables
from hpcllm.errors import CheckpointError
from hpcllm.model.shapes import parameter_shapes, split_layers

MODEL = ModelConfig(layers=5, hidden=96, heads=3, ffn=160, vocabulary=61, max_sequence=16)
SHAPES = parameter_shapes(MODEL)
CONFIG = from_tables({"run": {"seed": 17}, "model": {"layers": 5}})
TOKENIZER = '{"model": "größe"}'


def values(kind: str, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What every rank knows the tensor to be."""
    generator = torch.Generator().manual_seed(sum(f"{kind}/{name}".encode()))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def stage_shapes(stage: int, stages: int) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(MODEL, split_layers(MODEL, stages)[stage])


def state(stage: int, stages: int, dtype: torch.dtype) -> RunState:
    names = stage_shapes(stage, stages)
    return RunState(
        step=12,
        position=384,
        config=to_tables(CONFIG),
        parameters={name: torch.nn.Parameter(values("model", name, dtype)) for name in names},
        exp_avg={name: values("exp_avg", name) for name in names},
        exp_avg_sq={name: values("exp_avg_sq", name).square() for name in names},
        owned=frozenset(n for n in names if n != "embedding.weight" or stage == 0),
        tokenizer_json=TOKENIZER,
        mesh={"dp": 1, "pp": stages, "tp": 1},
    )


def empty(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_reads_what_any_other_wrote(comm, shared_path, dtype):
    stage_counts = [n for n in range(1, comm.size + 1) if comm.size % n == 0]
    for wrote in stage_counts:
        stage, dp_rank = comm.rank % wrote, comm.rank // wrote
        report = save(shared_path / str(wrote), state(stage, wrote, dtype), comm, dp_rank, comm.size // wrote)
        with Checkpoint.open(report.path, comm) as checkpoint:
            parallel_assert(tokenizer_json(checkpoint) == TOKENIZER)
            for reads in stage_counts:
                known, same = reads_the_same(checkpoint, stage_shapes(comm.rank % reads, reads), dtype)
                parallel_assert(same)
                parallel_assert((known.step, known.position, known.seed, known.mesh["pp"]) == (12, 384, 17, wrote))
                parallel_assert(from_tables(known.config) == CONFIG)


def reads_the_same(checkpoint: Checkpoint, shapes, dtype: torch.dtype) -> tuple[RunFacts, bool]:
    parameters, exp_avg, exp_avg_sq = (empty(shapes, kind) for kind in (dtype, torch.float32, torch.float32))
    known = restore(checkpoint, SHAPES, parameters, exp_avg, exp_avg_sq)
    same = [torch.equal(parameters[n], values("model", n, dtype)) for n in shapes]
    same += [torch.equal(exp_avg[n], values("exp_avg", n)) for n in shapes]
    same += [torch.equal(exp_avg_sq[n], values("exp_avg_sq", n).square()) for n in shapes]
    return known, all(same)


def bytes_written_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process wrote")
@pytest.mark.parallel([1, 2, 3])
def test_replicas_share_the_writing(comm, shared_path):
    """No replica brings more than its share and the largest tensor; some room for the tables and for MPI itself."""
    before = bytes_written_by_this_process()
    report = save(shared_path, state(0, 1, torch.float32), comm, comm.rank, comm.size)
    brought = bytes_written_by_this_process() - before
    largest = max(4 * math.prod(shape) for shape in SHAPES.values())
    parallel_assert(report.bytes // comm.size - largest <= brought <= report.bytes // comm.size + largest + (1 << 17))
    with Checkpoint.open(report.path, comm) as checkpoint:
        parallel_assert(all(len(item.checksums) == 1 for item in checkpoint.datasets.values()))
        parallel_assert(len(checkpoint.datasets) == 3 * len(SHAPES) + 1)


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, state(0, 1, torch.float32), MPI.COMM_SELF, 0, 1).path


def test_generate_needs_no_moments_and_may_ask_for_another_type(saved):
    parameters = empty(SHAPES, torch.bfloat16)
    with Checkpoint.open(saved) as checkpoint:
        restore(checkpoint, SHAPES, parameters, {}, {})
    assert all(torch.equal(parameters[name], values("model", name, torch.bfloat16)) for name in SHAPES)


def test_a_model_that_does_not_fit_is_told_the_first_differences(saved):
    fewer = {name: shape for name, shape in SHAPES.items() if not name.startswith("blocks.4.")}
    more = SHAPES | {f"blocks.5.{i}": (3,) for i in range(5)}
    other = SHAPES | {"final_norm.weight": (25,)}
    for shapes, message in [
        (fewer, r"blocks\.4\.\S+ is not of this model"),
        (more, r"blocks\.5\.0 is missing; .*blocks\.5\.2 is missing; and 2 more"),
        (other, r"final_norm\.weight has shape \(96,\), not \(25,\)"),
    ]:
        parameters = empty(shapes, torch.float32)
        with Checkpoint.open(saved) as checkpoint, pytest.raises(CheckpointError, match=message):
            restore(checkpoint, shapes, parameters, {}, {})
        assert all(tensor.isnan().all() for tensor in parameters.values())


def test_a_tensor_that_is_only_a_part_is_refused(saved):
    parameters = empty(SHAPES | {"final_norm.weight": (95,)}, torch.float32)
    with Checkpoint.open(saved) as checkpoint, pytest.raises(CheckpointError, match=r"final_norm\.weight .*95.* here"):
        restore(checkpoint, SHAPES, parameters, {}, {})


def test_a_file_of_no_run_is_named(tmp_path):
    path = write(tmp_path / "x.h5", MPI.COMM_SELF, {}, {}, {"run/step": 1}).path
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError, match=r"x\.h5 is not of a training run"):
        facts(checkpoint)


@pytest.mark.parallel([2, 3])
def test_a_fault_of_one_rank_is_known_to_all(comm, shared_path):
    path = save(shared_path, state(0, 1, torch.float32), comm, comm.rank, comm.size).path
    shapes = SHAPES | ({"final_norm.weight": (25,)} if comm.rank == 1 else {})
    with Checkpoint.open(path, comm) as checkpoint, pytest.raises(CheckpointError, match=r"rank 1: .*final_norm"):
        restore(checkpoint, shapes, empty(SHAPES, torch.float32), {}, {})
