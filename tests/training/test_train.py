"""Whole runs: every layout trains the same model, a resumed run the same bits, a failing one leaves what it had."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import make_store, with_tables

from hpcllm.checkpoint import background
from hpcllm.checkpoint.archive import compress
from hpcllm.checkpoint.diff import difference
from hpcllm.checkpoint.folder import newest_first
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.collectives import group
from hpcllm.collectives.worker import can_thread
from hpcllm.config import schema as configs
from hpcllm.config.policies import POLICIES
from hpcllm.config.schema import Config
from hpcllm.errors import ConfigError, DataError, MeshError, NonFiniteError, ReplicaError, ScheduleError
from hpcllm.optim.buckets import GradientBuckets
from hpcllm.optim.flat_buffers import EXP_AVG
from hpcllm.pipeline.measured import read_trace
from hpcllm.pipeline.schedules import SCHEDULES, make_schedule
from hpcllm.system.job import StopSignals
from hpcllm.training import loop as train_module
from hpcllm.training.requests import Requests
from hpcllm.training.summary import Summary

LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (4, 1), (1, 4)]}
WIRINGS = {
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": "all", "tied": True},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "tied": False},
}
STEPS = 20
FEW_STEPS = 8  # for the many layouts


@pytest.fixture
def store(comm, shared_path) -> Path:
    return make_store(shared_path, comm, documents=40, vocabulary=300)


def run_config(store: Path, wiring: str = "gpt2", **tables) -> Config:
    model = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 48, "max_sequence": 32, **WIRINGS[wiring]}
    base = {
        "run": {"name": "r", "folder": str(store.parent / "runs"), "steps": STEPS},
        "model": model,
        "data": {"store": str(store), "sequence_length": 32, "global_batch": 12, "validation_sequences": 37},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5},
        "communication": {"bucket_mib": 0.01},
        "checkpoint": {"every_steps": 0},
        "log": {"every_steps": 1, "trackers": []},
        "limits": {"stall_s": 15},
    }
    return with_tables(base, tables)


def train(config: Config, comm, restart: bool = False) -> Summary:
    with StopSignals() as signals:
        summary = train_module.train(config, comm, signals, restart)
    comm.Barrier()  # rank 0 has closed its log
    return summary


def logged_by_step(config: Config, key: str) -> dict:
    lines = (Path(config.run.folder) / config.run.name / "log.jsonl").read_text().splitlines()
    return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}


def logged(config: Config, key: str) -> list:
    return list(logged_by_step(config, key).values())


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize(
    "wiring",
    [pytest.param("gpt2", marks=pytest.mark.full(reason="all schedules: half a minute")), "llama"],
)
def test_every_layout_trains_the_same_model(comm, store, wiring):
    alone = comm.Split(comm.rank)
    reference = run_config(
        store,
        wiring,
        run={"name": f"alone {comm.rank}", "folder": str(store.parent / "runs"), "steps": FEW_STEPS},
        model={"layers": 8},  # two chunks on each of four ranks
    )
    want = train(reference, alone)
    for dp, pp in LAYOUTS[comm.size]:
        for schedule in SCHEDULES if wiring == "gpt2" and pp > 1 else ("1f1b", "zb-v"):
            config = run_config(
                store,
                wiring,
                run={"name": f"{dp} {pp} {schedule}", "folder": str(store.parent / "runs"), "steps": FEW_STEPS},
                mesh={"dp": dp, "pp": pp},
                model={"layers": 8},
                pipeline={"schedule": schedule, "microbatches": 12 // dp // 2},
            )
            got = train(config, comm)
            np.testing.assert_allclose(logged(config, "loss"), logged(reference, "loss"), rtol=1e-5)
            np.testing.assert_allclose(logged(config, "grad_norm"), logged(reference, "grad_norm"), rtol=1e-4)
            assert logged(config, "samples") == logged(reference, "samples")
            assert got.validation.samples == want.validation.samples
            np.testing.assert_allclose(got.validation.bits_per_byte, want.validation.bits_per_byte, rtol=1e-5)
    assert logged(reference, "loss")[-1] < 0.95 * logged(reference, "loss")[0]  # there was something to agree on
    alone.Free()


def tensors(path: Path) -> dict[str, bytes]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("gradients", ["raw", "bf16", "int8:128:sr"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(comm, store, monkeypatch, gradients):
    dp, pp = LAYOUTS[comm.size][0]
    tables = {"mesh": {"dp": dp, "pp": pp}, "pipeline": {"microbatches": 2}}
    tables |= {"communication": {"gradients": gradients, "forward": "zfp:16", "bucket_mib": 0.01, "exact_steps": 3}}
    straight = run_config(
        store, run={"name": "straight", "folder": str(store.parent / "runs"), "steps": STEPS}, **tables
    )
    cut = run_config(store, run={"name": "cut", "folder": str(store.parent / "runs"), "steps": STEPS}, **tables)
    whole = train(straight, comm)
    stop_after(monkeypatch, 10, signal.SIGUSR1, rank=comm.size - 1, comm=comm)
    half = train(cut, comm)
    assert (half.step, half.validation) == (10, None)
    assert half.stopped_by
    monkeypatch.undo()
    rest = train(cut, comm)
    assert rest.step == STEPS
    assert list(logged_by_step(cut, "loss")) == list(logged_by_step(straight, "loss"))
    assert logged(cut, "loss") == logged(straight, "loss")
    assert tensors(rest.checkpoint) == tensors(whole.checkpoint)
    with Checkpoint.open(rest.checkpoint) as resumed, Checkpoint.open(whole.checkpoint) as uninterrupted:
        facts = difference(resumed, uninterrupted).facts
    assert set(facts) <= {"run/config/run.name"}, facts  # what `checkpoint diff` says


def stop_after(monkeypatch, step: int, number: signal.Signals, rank: int, comm) -> None:
    """Send this process a real signal in the middle of one step, on one rank only."""
    steps = []

    def begin_then_signal(self, *which, begin=GradientBuckets.begin):
        steps.append(None)
        if len(steps) == step and comm.rank == rank:
            os.kill(os.getpid(), number)
        begin(self, *which)

    monkeypatch.setattr(GradientBuckets, "begin", begin_then_signal)


@pytest.mark.parallel([2, 3])
def test_any_layout_goes_on_from_any_other(comm, store):
    name = {"name": "r", "folder": str(store.parent / "runs")}
    straight = run_config(store, run={**name, "name": "straight", "steps": STEPS}, mesh={"pp": comm.size})
    train(straight, comm)
    # the rate's cosine ends at run.steps, so both halves need a rate that does not depend on it
    flat = {"learning_rate": 1e-3, "warmup_steps": 5, "final_fraction": 1.0}
    first = run_config(store, run={**name, "steps": 7}, mesh={"dp": comm.size}, optimizer=flat)
    second = run_config(store, run={**name, "steps": 14}, mesh={"pp": comm.size}, optimizer=flat)
    other = run_config(store, run={**name, "name": "other", "steps": 14}, mesh={"pp": comm.size}, optimizer=flat)
    path = train(first, comm).checkpoint
    if comm.rank == 0:  # an archive in its place is as good
        compress(path, path.with_suffix(".archive"), None)
        path.with_suffix(".archive").replace(path)
    comm.Barrier()
    train(second, comm)
    train(other, comm)
    np.testing.assert_allclose(logged(second, "loss"), logged(other, "loss"), rtol=1e-5)


@pytest.mark.parallel([1, 2, 3])
def test_any_schedule_goes_on_from_any_other(comm, store):
    """Each part of the run has other chunks and another division of the layers; the loss curve does not know."""
    chain = [
        {"schedule": "zb-v", "layers": [1] * (2 * comm.size - 1) + [7 - 2 * comm.size + 2]},
        {"schedule": "interleaved", "chunks": 3 if comm.size < 3 else 2},
        {"schedule": "gpipe"},
        {"schedule": "zb-h1", "layers": [8 - comm.size + 1] + [1] * (comm.size - 1)},
        {"schedule": "custom", "file": str(store.parent / "a schedule.txt")},
    ]
    if comm.rank == 0:
        (store.parent / "a schedule.txt").write_text(make_schedule("interleaved", comm.size, 3, 2).text())
    # the rate's cosine ends at run.steps, so all parts need a rate that does not depend on it
    flat = {"learning_rate": 1e-3, "warmup_steps": 5, "final_fraction": 1.0}
    common = {"mesh": {"pp": comm.size}, "model": {"layers": 8}, "optimizer": flat}
    folder = {"folder": str(store.parent / "runs")}
    straight = run_config(
        store, run={**folder, "name": "straight", "steps": 15}, pipeline={"microbatches": 3}, **common
    )
    train(straight, comm)
    for part, pipeline in enumerate(chain, start=1):
        run = {**folder, "name": "chain", "steps": 3 * part}
        config = run_config(store, run=run, pipeline={**pipeline, "microbatches": 3}, **common)
        train(config, comm)
    assert list(logged_by_step(config, "loss")) == list(range(1, 16))
    np.testing.assert_allclose(logged(config, "loss"), logged(straight, "loss"), rtol=1e-5)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_after_the_step_with_a_checkpoint(comm, store, monkeypatch, number):
    stop_after(monkeypatch, 3, number, rank=0, comm=comm)
    config = run_config(store, mesh={"dp": comm.size})
    summary = train(config, comm)
    assert summary.step == 3
    assert summary.checkpoint.name == "step_00000003.h5"
    assert list(logged_by_step(config, "loss")) == [1, 2, 3]


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(comm, store, monkeypatch, axis):
    """That of step 5, which is still being written when all have agreed on the loss of step 6."""
    steps, is_agreed = [], threading.Event()

    def agree(*arguments, agree=train_module.agree):
        found = agree(*arguments)
        if len(steps) == 6:
            is_agreed.set()
        return found

    def held(*arguments, write=background.write):
        assert not can_thread() or is_agreed.wait(60)
        return write(*arguments)

    def poison(self, *which, begin=GradientBuckets.begin):
        steps.append(None)
        if len(steps) == 6 and comm.rank == comm.size - 1:
            parameters[-1].data.fill_(float("nan"))
        begin(self, *which)

    parameters = []
    build = train_module.open_run

    def open_run(*arguments):
        context = build(*arguments)
        run = context.__enter__()
        parameters.extend(run.parameters.values())
        monkeypatch.setattr(context, "__enter__", lambda: run, raising=False)
        return _Entered(context, run)

    monkeypatch.setattr(train_module, "open_run", open_run)
    monkeypatch.setattr(train_module, "agree", agree)
    monkeypatch.setattr(background, "write", held)
    monkeypatch.setattr(GradientBuckets, "begin", poison)
    config = run_config(store, mesh={axis: comm.size}, checkpoint={"every_steps": 5})
    with pytest.raises(NonFiniteError, match=rf"step 6: loss nan.* on rank {comm.size - 1} .*step_00000005\.h5"):
        train(config, comm)
    assert [path.name for path in newest_first(Path(config.run.folder) / "r" / "checkpoints")] == ["step_00000005.h5"]


class _Entered:
    """A context that has been entered already."""

    def __init__(self, context, run) -> None:
        self.context, self.run = context, run

    def __enter__(self):
        return self.run

    def __exit__(self, *error):
        return self.context.__exit__(*error)


@pytest.mark.parallel([1, 2])
def test_restart_begins_anew_and_keeps_the_old_folder(comm, store):
    config = run_config(store, run={"name": "r", "folder": str(store.parent / "runs"), "steps": 3})
    first = train(config, comm)
    again = train(config, comm)
    assert np.isnan(again.loss)  # nothing was left to do
    assert again.validation == first.validation
    anew = train(config, comm, restart=True)
    assert anew.loss == first.loss
    comm.Barrier()
    assert len(list(Path(config.run.folder).glob("r.before-*/checkpoints/step_00000003.h5"))) == 1


@pytest.mark.parallel([1, 2])
def test_only_the_newest_checkpoints_stay(comm, store):
    config = run_config(store, checkpoint={"every_steps": 2, "keep": 3})
    train(config, comm)
    comm.Barrier()
    kept = [path.name for path in newest_first(Path(config.run.folder) / "r" / "checkpoints")]
    assert kept == ["step_00000020.h5", "step_00000018.h5", "step_00000016.h5"]


@pytest.mark.parallel([2])
def test_what_cannot_be_is_rejected_before_any_work(comm, store):
    short = {"name": "r", "folder": str(store.parent / "runs"), "steps": 2}
    stuck = str(store.parent / "stuck.txt")
    if comm.rank == 0:  # the first rank wants the gradient before it sends the activation
        text = make_schedule("1f1b", 2, 1).text()
        Path(stuck).write_text(re.sub("rank 0:.*", "rank 0: F0 RECV_B0 B0 SEND_F0", text))
    comm.Barrier()
    cases = [
        (run_config(store, mesh={"dp": 2, "pp": 2}), MeshError, r"= 2 \* 2 \* 1 = 4, but the job has 2 ranks; start"),
        (run_config(store, data={"global_batch": 7}), MeshError, r"global_batch = 7 .* valid dp: 1, 7"),
        (run_config(store, pipeline={"microbatches": 4}), MeshError, r"microbatches = 4 .* valid: 1, 2, 3, 6"),
        (run_config(store, model={"vocabulary": 200}), ConfigError, r"vocabulary = 200 is smaller .* 300; valid"),
        (run_config(store, data={"store": "nowhere.h5"}), DataError, r"nowhere\.h5"),
        (run_config(store, data={"store": ""}), ConfigError, r"data\.store is missing"),
        (run_config(store, mesh={"pp": 2}, pipeline={"schedule": "zb-h1", "chunks": 2}), ScheduleError, "chunks"),
        (run_config(store, mesh={"pp": 2}, pipeline={"schedule": "interleaved", "chunks": 3}), MeshError, "6 stages"),
        (run_config(store, pipeline={"schedule": "custom", "file": "no such.txt"}), ScheduleError, "no such.txt"),
        (run_config(store, mesh={"pp": 2}, pipeline={"schedule": "custom", "file": stuck}), ScheduleError, "waits for"),
        (run_config(store, checkpoint={"writer": "mpio"}), ConfigError, "needs an h5py built with a parallel HDF5"),
    ]
    for config, kind, message in cases:
        with pytest.raises(kind, match=message):
            train(config, comm)
        assert not (Path(config.run.folder) / "r").exists()
    train(run_config(store, run=short), comm)
    changes = [("model", "hidden", 64), ("run", "seed", 1), ("data", "sequence_length", 16)]
    for table, key, value in [*changes, ("data", "document_mask", False)]:
        config = run_config(store, run=short)
        section = dataclasses.replace(getattr(config, table), **{key: value})
        with pytest.raises(ConfigError, match=rf"{table}\.{key} = {value}, was"):
            train(dataclasses.replace(config, **{table: section}), comm)
    config = run_config(store, run=short)
    respelt = dataclasses.replace(config.model, kv_heads=config.model.heads, preset="gpt2-124m", rope_theta=2.0)
    assert train(dataclasses.replace(config, model=respelt), comm).step == config.run.steps  # it computes the same


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_learns_and_keeps_its_replicas_equal(comm, store, policy):
    """The first steps are exact; then losses differ from exact training by little, or not at all where that is due."""
    runs = {}
    for dp, pp in LAYOUTS[comm.size]:
        for name in ("none", policy):
            communication = {"policy": name, "exact_steps": 5, "hash_every_steps": 1, "bucket_mib": 0.02}
            run = {"name": f"{dp} {pp} {name}", "folder": str(store.parent / "runs"), "steps": STEPS}
            mesh, pipeline = {"dp": dp, "pp": pp}, {"microbatches": 2 if pp > 1 else 1}
            runs[name] = run_config(store, run=run, mesh=mesh, pipeline=pipeline, communication=communication)
            train(runs[name], comm)
        got, want = (np.array(logged(runs[name], "loss")) for name in (policy, "none"))
        assert np.array_equal(got[:5], want[:5])
        np.testing.assert_allclose(got, want, rtol=2e-2)
        codecs = configs.traffic_codecs(runs[policy].communication)
        for kind, sent in [("gradients", dp > 1), ("forward", pp > 1), ("backward", pp > 1)]:
            ratios = logged_by_step(runs[policy], f"{kind}_ratio")  # of messages; sums in shared memory send none
            assert all(ratios.get(step, 1.0) == 1.0 for step in range(1, 6))
            if sent and codecs[kind] not in ("raw", "mpc"):
                assert ratios[STEPS] > 1.1
        lossless = dp == 1 and codecs["forward"] in ("raw", "mpc", "exp")
        assert not lossless or np.array_equal(got, want)


@pytest.mark.parallel([1, 2])
def test_the_debug_log_shows_what_a_rank_does(comm, store, caplog):
    run = {"name": "r", "folder": str(store.parent / "runs"), "steps": 2}
    config = run_config(store, run=run, mesh={"dp": comm.size})
    with caplog.at_level("DEBUG", "hpcllm"):
        train(config, comm)
    said = [f"{record.name.removeprefix('hpcllm.')}: {record.getMessage()}" for record in caplog.records]
    expected = (f"data.store: opened {store}", f"mpi.mesh: rank {comm.rank} of {comm.size} is dp {comm.rank}")
    expected += ("training.step: step 1,", "training.step: step 2,", "checkpoint.background: wrote ")
    expected += ("collectives.auto: allreduce of ",) if comm.size > 1 else ()
    for words in expected:
        assert any(line.startswith(words) for line in said), (words, said)


@pytest.mark.parallel([2, 4])
def test_replicas_that_drift_apart_end_the_run_by_name(comm, store, monkeypatch):
    drift, step = {"first": 12}, train_module.forward_backward

    def spoil(run, number, position):
        if number == drift["first"] and comm.rank == comm.size - 1:
            next(iter(run.parameters.values())).data.view(-1)[0] += 1e-3
        return step(run, number, position)

    monkeypatch.setattr(train_module, "forward_backward", spoil)
    config = run_config(store, mesh={"dp": comm.size}, communication={"hash_every_steps": 5})
    with pytest.raises(ReplicaError, match=rf"step 15: .*embedding\.weight: rank {comm.size - 1} against "):
        train(config, comm)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("part", ["parameters", "first moments"])
@pytest.mark.parametrize("save", ["by interval", "at the end", "by request"])
def test_replicas_that_differ_are_not_saved(comm, store, monkeypatch, part, save):
    """Each replica writes a part of a checkpoint, so one of unequal replicas would be read as if they were equal."""
    update, agree = train_module.update, train_module.agree

    def spoil(run, norm, rate):
        is_finite = update(run, norm, rate)
        if run.optimizer.updates == 8 and comm.rank == comm.size - 1:
            moments = {piece.name: piece.values for piece in run.optimizer.pieces_to_read() if piece.kind == EXP_AVG}
            tensors = {"parameters": run.parameters, "first moments": moments}[part]
            tensors["embedding.weight"].data.view(-1)[0] += 1e-3
        return is_finite

    def request(run, *rest):
        agreed = agree(run, *rest)
        asked = save == "by request" and run.optimizer.updates == 7
        return dataclasses.replace(agreed, requests=Requests(save=True)) if asked else agreed

    monkeypatch.setattr(train_module, "update", spoil)
    monkeypatch.setattr(train_module, "agree", request)
    config = run_config(
        store,
        run={
            "name": f"{part} {save}",
            "folder": str(store.parent / "runs"),
            "steps": 8 if save == "at the end" else 20,
        },
        mesh={"dp": comm.size},
        checkpoint={"every_steps": 8 if save == "by interval" else 0},
        communication={"hash_every_steps": 0},
    )
    with pytest.raises(ReplicaError, match=rf"step 8: .*the same {part}; .*rank {comm.size - 1} against "):
        train(config, comm)
    assert not list((store.parent / "runs" / config.run.name / "checkpoints").glob("*.h5"))


@pytest.mark.parallel([4])
def test_lossy_gradients_still_give_equal_replicas(comm, store):
    config = run_config(store, "llama", mesh={"dp": 4}, communication={"gradients": "int4", "bucket_mib": 0.01})
    with train_module.open_run(config, comm) as run:
        run.gradients.begin(100, exact=False)
        for p in run.parameters.values():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(comm.rank))
            run.gradients.added(p)
        run.gradients.finish()
        mine = b"".join(bucket.gradients.numpy().tobytes() for bucket in run.gradients.buckets)
        assert comm.allgather(mine).count(mine) == 4


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_run_writes_the_traces_that_were_requested_and_where_its_ranks_are(comm, store):
    for dp, pp in LAYOUTS[comm.size]:
        config = run_config(
            store,
            run={"name": f"traced {pp}", "folder": str(store.parent / "runs"), "steps": 4},
            mesh={"dp": dp, "pp": pp},
            pipeline={"schedule": "zb-h1", "microbatches": 12 // dp // 2},
            log={"trace_steps": [2, 4]},
        )
        train(config, comm)
        folder = Path(config.run.folder) / config.run.name
        assert sorted(path.name for path in (folder / "trace").iterdir()) == [
            "step_00000002.json",
            "step_00000004.json",
        ]
        for step in (2, 4):
            replicas = read_trace(folder / "trace" / f"step_0000000{step}.json")
            assert [(found.step, found.replica) for found in replicas] == [(step, replica) for replica in range(dp)]
            assert all(found.schedule == make_schedule("zb-h1", pp, 12 // dp // 2) for found in replicas)
        lines = (folder / "ranks.txt").read_text().splitlines()
        assert [line.partition(",")[0] for line in lines] == [f"rank {r}: dp {r % dp}" for r in range(comm.size)]
        assert f", process {os.getpid()} on " in lines[comm.rank]


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("shard", ["none", "states", "all"])
def test_a_step_has_the_bytes_that_it_has_where_nothing_is_measured_between_steps(comm, store, monkeypatch, shard):
    """Sums and weights may be under way when a validation begins, whose own messages are no step's."""
    make_group, bytes_of = group.make_group, []
    monkeypatch.setattr(group, "make_group", lambda comm, _=None: make_group(comm, MPI.COMM_SELF))  # each rank a node
    for every in (0, 1):
        config = run_config(
            store,
            run={"name": f"{shard} {every}", "steps": 5},
            data={"validation_sequences": 12},
            optimizer={"shard": shard},
            communication={
                "gradients": "bf16",
                "parameters": "bf16",
                "exact_steps": 0,
            },  # the library's are not counted
            log={"validation_every_steps": every},
        )
        train(config, comm)
        bytes_of.append([logged_by_step(config, f"{kind}_bytes") for kind in ("gradients", "parameters")])
        assert len(logged(config, "validation_loss")) == (5 if every else 1)
    assert bytes_of[0] == bytes_of[1]
    assert any(bytes_of[0])
