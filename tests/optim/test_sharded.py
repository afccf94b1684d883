"""Whatever the replicas share of the optimizer, a run is the run of one process, and memory is what the level says."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import losses, run_steps, tiny

from hpcllm.collectives import chunk_range
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError
from hpcllm.model.shapes import ENDS, unit_of
from hpcllm.optim.flat_buffers import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece
from hpcllm.optim.weights import Zero3Weights
from hpcllm.system.job import StopSignals
from hpcllm.training.log import TRAFFIC
from hpcllm.training.loop import train

SHARDED = ["states", "states+gradients", "all"]
LEVELS = ["none", *SHARDED]
LAYOUTS = {1: [(1, 1, 1)], 2: [(2, 1, 1)], 3: [(3, 1, 1)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, 2)]}
FEW = 6  # steps, where 20 would show no more


def optimizer(shard: str) -> dict[str, object]:
    return {"learning_rate": 3e-3, "warmup_steps": 5, "shard": shard}


def alone(**tables) -> np.ndarray:
    return losses(tiny(**tables), MPI.COMM_SELF)


@cache
def reference(steps: int) -> np.ndarray:
    return losses(tiny(), MPI.COMM_SELF, steps)


def bits(tensors) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("shard", SHARDED)
def test_steps_are_those_of_one_process(comm, shard):
    steps = 20 if comm.size < 3 else FEW
    want = reference(steps)
    for dp, pp, tp in LAYOUTS[comm.size]:
        pipelines = [("1f1b", 1, "none"), ("zb-h1", 3, "full")] if dp < 3 else [("gpipe", 3 - dp % 2, "selective")]
        for schedule, microbatches, recompute in pipelines if shard != "all" or pp == 1 else []:
            config = tiny(
                mesh={"dp": dp, "pp": pp, "tp": tp, "sequence_parallel": tp > 1},
                optimizer=optimizer(shard),
                pipeline={"schedule": schedule, "microbatches": microbatches, "recompute": recompute},
            )
            got = losses(config, comm, steps)
            np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-5)
            np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=1e-4)
    assert want[-1, 0] < want[0, 0]


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("shard", SHARDED)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_several_chunks_a_rank_change_nothing(comm, shard, schedule):
    """On four ranks two pipelines, the ends of which share an embedding and are at other points of the program."""
    pp = 2 if comm.size == 4 and shard != "all" else 1
    shape = {"layers": 4, "hidden": 16, "heads": 2, "ffn": 24, "max_sequence": 16, "tied": pp == 2}
    tables = {"model": shape, "run": {"name": "r", "steps": FEW}}
    pipeline = {"schedule": schedule, "microbatches": 6 if pp == 2 else {2: 2, 3: 2, 4: 3}[comm.size], "chunks": 2}
    config = tiny(**tables, mesh={"pp": pp}, optimizer=optimizer(shard), pipeline=pipeline)
    np.testing.assert_allclose(losses(config, comm), alone(**tables), rtol=1e-4)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", LEVELS)
def test_ragged_sizes_and_shares_without_a_value(comm, shard):
    """Each parameter is a flat buffer of its own, and one replica of three has no value of a norm of two channels."""
    model = {"layers": 2, "hidden": 2, "heads": 1, "kv_heads": 1, "ffn": 3, "max_sequence": 16, "tied": False}
    few = {"model": model, "communication": {"bucket_mib": 1e-6}, "run": {"name": "r", "steps": FEW}}
    want = alone(**few)
    got = losses(tiny(**few, optimizer=optimizer(shard), pipeline={"microbatches": 2}), comm)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    if comm.size == 3:
        assert any(start == end for start, end in (chunk_range(2, 3, rank) for rank in range(3)))


def everything(parts) -> list[bytes]:
    """The whole model, as this rank has it."""
    parts.optimizer.settle()
    weights = parts.optimizer.weights
    if isinstance(weights, Zero3Weights):
        for unit in sorted({unit_of(name) for name in parts.parameters}):
            weights.gather(unit)
        weights.settle()
    return bits(parts.parameters.values())


LONG = {
    "run": {"name": "r", "steps": 200},
    "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "max_sequence": 16},
    "data": {"sequence_length": 8, "global_batch": 4},
}


@cache
def exact_losses(ranks: int) -> np.ndarray:
    """Of 200 steps on so many replicas: all ranks of the tests. Collective over them the first time."""
    assert ranks == MPI.COMM_WORLD.size
    return losses(tiny(**LONG, optimizer=optimizer("none")), MPI.COMM_WORLD)[:, 0]


@pytest.mark.full(reason="two hundred steps, a tenth of a minute a case", in_ci=True)
@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    ("shard", "gradients", "parameters", "compute"),
    [
        ("states", "int8:256", "int4:128", "fp32"),
        ("states+gradients", "int4:128+ef", "int8:256", "bf16"),
        ("all", "int4:128+ef", "int8:256", "fp32"),
    ],
)
def test_replicas_are_equal_after_two_hundred_lossy_steps_and_losses_near_exact_ones(
    comm, shard, gradients, parameters, compute
):
    def run_and_compare(parts) -> np.ndarray:
        seen = run_steps(parts, 200)
        mine = everything(parts)
        assert comm.allgather(mine).count(mine) == comm.size
        return seen[:, 0]

    codecs = {"gradients": gradients, "parameters": parameters, "exact_steps": 2}
    config = tiny(**LONG, communication=codecs, optimizer=optimizer(shard), precision={"compute": compute})
    got, want = losses(config, comm, 0, run_and_compare), exact_losses(comm.size)
    assert abs(got[-50:].mean() / want[-50:].mean() - 1) < 0.02
    assert want[-50:].mean() < 0.7 * want[0]
    assert not np.array_equal(got, want)  # the codecs had a say


@pytest.mark.parallel([2, 3])
def test_differences_make_up_for_what_a_codec_lost(comm):
    """Weights of int4 differences stay near the master weights; each step brings what the last one did not."""

    def lag(parts) -> float:
        parts.optimizer.settle()
        pieces = parts.optimizer.pieces_to_read()
        model = {(p.name, p.start): p.values for p in pieces if p.kind == MODEL}
        master = {(p.name, p.start): p.values for p in pieces if p.kind == MASTER}
        assert model.keys() == master.keys()
        return max((float((model[key] - master[key]).abs().max()) for key in model), default=0.0)

    codecs = {"parameters": "int4:128", "exact_steps": 1, "bucket_mib": 0.02}
    for steps, most in ((1, 0.0), (2, 2e-3), (60, 2e-3)):  # a weight moves about the learning rate, 3e-3, in a step
        config = tiny(run={"name": "r", "steps": 60}, communication=codecs, optimizer=optimizer("states"))
        found = losses(config, comm, steps, lag)
        assert comm.allreduce(found, MPI.MAX) <= most
    assert comm.allreduce(found, MPI.MAX) > 0


def storages(tensors) -> int:
    """Bytes of all storages behind the tensors, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(found.values())


def held(parts) -> dict[str, int]:
    """Bytes of weights, gradients and states that a rank holds between two steps."""
    shares = parts.optimizer.shares
    pieces = parts.optimizer.pieces_to_read()
    kept = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts.parameters.values()}
    kept |= {p.values.untyped_storage().data_ptr(): p.values.untyped_storage().nbytes() for p in pieces
             if p.kind == MODEL}  # fmt: skip
    kept.pop(0, None)
    gradients = [share.untyped_storage() for share in parts.gradients.shares]
    return {
        "weights": sum(kept.values()),
        "gradients": sum({g.data_ptr(): g.nbytes() for g in gradients}.values()),
        "states": storages([x for share in shares for x in (share.operands.exp_avg, share.operands.exp_avg_sq)]),
        "master": storages([share.master for share in shares if share.master is not None]),
    }


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_memory_is_what_the_level_says(comm, shard, compute):
    # private memory, so that a storage is a tensor's own; hidden channels that all of them divide
    model = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "max_sequence": 16}
    config = tiny(model=model, optimizer=optimizer(shard), precision={"compute": compute})

    def check(parts) -> None:
        n, width, ranks = sum(p.numel() for p in parts.parameters.values()), 2 if compute == "bf16" else 4, comm.size
        share = {level: n if level == "none" else n / ranks for level in LEVELS}[shard]
        if isinstance(parts.optimizer.weights, Zero3Weights):
            for unit in sorted({unit_of(name) for name in parts.parameters}):
                parts.optimizer.weights.free(unit)
        found = held(parts)
        assert found["states"] == pytest.approx(8 * share, rel=0.01)
        assert found["master"] == pytest.approx(4 * share if compute == "bf16" else 0, rel=0.01)
        if comm.size == 1 or shard in ("states+gradients", "all"):  # else it lies in memory of the node
            assert found["gradients"] == pytest.approx(4 * share, rel=0.01)
        if comm.size == 1 or shard in ("none", "all"):
            assert found["weights"] == pytest.approx(width * (share if shard == "all" else n), rel=0.01)

    losses(config, comm, 2, check)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_units_come_and_go(comm, recompute, monkeypatch):
    """Besides the ends at most four of six blocks are here at once, each is gathered as often as it was let go."""
    model = {"layers": 6, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "max_sequence": 16}
    most, came = [], Counter()
    gather = Zero3Weights.gather

    def counted(self, unit):
        came[unit] += unit not in self._gathered
        gather(self, unit)
        most.append(sum(other != ENDS for other in self._gathered))

    monkeypatch.setattr(Zero3Weights, "gather", counted)
    pipeline = {"microbatches": 2, "recompute": recompute}
    config = tiny(model=model, optimizer=optimizer("all"), pipeline=pipeline, run={"name": "r", "steps": 1})

    def check(parts) -> None:
        assert set(parts.optimizer.weights._gathered) == set()  # after the update all of it is old
        assert max(most) <= 3
        assert came[ENDS] == 1
        # forward and backward of two microbatches; first and last are at a turn each time
        assert [came[f"blocks.{i}"] for i in range(6)] == [3 if i == 0 else 4 if i < 5 else 2 for i in range(6)]

    losses(config, comm, 1, check)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", LEVELS)
def test_pieces_to_write_are_all_of_the_state_once(comm, shard):
    """The ranges of all replicas, of each kind and parameter, laid side by side."""

    def ranges(pieces: list[Piece]) -> list[tuple[str, str, int, int]]:
        assert all(p.values.shape == (p.end - p.start,) for p in pieces)
        return [(p.kind, p.name, p.start, p.end) for p in pieces]

    def check(parts) -> None:
        sizes = {name: p.numel() for name, p in parts.parameters.items()}
        written = [found for rank in comm.allgather(ranges(parts.optimizer.pieces_to_write())) for found in rank]
        kinds = {MODEL, EXP_AVG, EXP_AVG_SQ, MASTER}
        assert {(kind, name) for kind, name, _, _ in written} == {(kind, name) for kind in kinds for name in sizes}
        for kind in kinds:
            for name, size in sizes.items():
                cuts = sorted((start, end) for k, n, start, end in written if (k, n) == (kind, name))
                assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
                assert cuts[-1][1] == size

    losses(tiny(optimizer=optimizer(shard), precision={"compute": "bf16"}), comm, 1, check)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("parameters", ["raw", "int8:256"])
def test_a_state_read_back_goes_on_to_the_bit(comm, shard, parameters):
    codecs = {"parameters": parameters, "exact_steps": 1, "bucket_mib": 0.02}
    config = tiny(optimizer=optimizer(shard), communication=codecs)

    def take(parts) -> tuple[list[Piece], np.ndarray]:
        kept = [Piece(p.kind, p.name, p.start, p.end, p.values.clone()) for p in parts.optimizer.pieces_to_read()]
        return kept, run_steps(parts, 3, first=4)

    def put(parts) -> np.ndarray:
        for empty, full in zip(parts.optimizer.pieces_to_read(), kept, strict=True):
            assert (empty.kind, empty.name, empty.start) == (full.kind, full.name, full.start)
            empty.values.copy_(full.values)
        parts.optimizer.loaded(4)
        return run_steps(parts, 3, first=4)

    kept, want = losses(config, comm, 4, take)
    assert np.array_equal(losses(config, comm, 1, put), want)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", LEVELS)
def test_what_parameters_take_on_the_wire_is_counted(comm, shard):
    config = tiny(optimizer=optimizer(shard), communication={"parameters": "int8:256", "exact_steps": 0})

    def count(parts) -> tuple[float, float]:
        parts.optimizer.settle()
        seen = dict(zip(TRAFFIC, parts.traffic(), strict=True))
        return seen["parameters_plain_bytes"], seen["parameters_bytes"]

    plain, sent = np.sum(comm.allgather(losses(config, comm, 2, count)), axis=0)
    assert (plain > 0) == (shard != "none")
    assert sent <= plain / 3


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"optimizer": {"shard": "all"}, "mesh": {"pp": 2}}, r"shard = 'all' with mesh\.pp = 2.*valid: mesh\.pp = 1"),
        ({"optimizer": {"shard": "states"}, "communication": {"algorithm": "rabenseifner"}},
         r"algorithm = 'rabenseifner' .*'states'.*valid: auto, ring, two_step"),
        ({"optimizer": {"shard": "zero"}}, r"shard = 'zero' .* 'states\+gradients'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(tables, message):
    from hpcllm.config.schema import from_tables

    with pytest.raises(ConfigError, match=message):
        from_tables(tables)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("shard", ["states", "all"])
@pytest.mark.parametrize("algorithm", ["ring", "two_step", "node_window", "native"])
def test_every_algorithm_that_shares_out_a_sum_will_do(comm, shard, algorithm):
    want = alone(run={"name": "r", "steps": FEW})
    config: Config = tiny(
        optimizer=optimizer(shard), communication={"algorithm": algorithm}, run={"name": "r", "steps": FEW}
    )
    np.testing.assert_allclose(losses(config, comm), want, rtol=1e-4)


@pytest.mark.parallel([2, 3])
def test_any_level_goes_on_from_any_other_with_validation_and_checks_on_the_way(comm):
    """Whole runs: each part of the chain shares something else, and the loss curve does not know."""

    def run(name: str, steps: int, shard: str) -> Config:
        flat = {**optimizer(shard), "final_fraction": 1.0}  # a rate that does not depend on run.steps
        config = tiny(
            run={"name": f"{name} {comm.size}", "folder": tiny().run.folder, "steps": steps},
            optimizer=flat,
            communication={"hash_every_steps": 2, "bucket_mib": 0.02},
            log={"every_steps": 1, "validation_every_steps": 3, "trackers": []},
        )
        with StopSignals() as signals:
            train(config, comm, signals)
        comm.Barrier()
        return config

    straight = run("straight", 16, "none")
    for part, shard in enumerate(["all", "states+gradients", "none", "states"], start=1):
        chain = run("chain", 4 * part, shard)
    for key in ("loss", "validation_loss"):
        want, got = logged(straight, key), logged(chain, key)
        assert want.keys() <= got.keys()  # the chain also validates where one of its parts ends
        np.testing.assert_allclose([got[step] for step in want], list(want.values()), rtol=1e-5)


def logged(config: Config, key: str) -> dict[int, float]:
    lines = (Path(config.run.folder) / config.run.name / "log.jsonl").read_text().splitlines()
    return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}
