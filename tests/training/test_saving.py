"""Checkpoints behind a run: what is written is what was there, a run that was cut off ends with the same bits."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytest_mpi import parallel_assert
from small_checkpoints import write_slabs
from small_runs import tiny

from hpcllm.checkpoint import background, writer
from hpcllm.checkpoint.folder import newest_first, step_of
from hpcllm.checkpoint.reader import Checkpoint
from hpcllm.checkpoint.restore import restore_residuals
from hpcllm.checkpoint.state import FEEDBACK, FEEDBACK_LAYOUT, find_residuals
from hpcllm.config.schema import CheckpointConfig, Config
from hpcllm.data.loader import samples_hash
from hpcllm.errors import CheckpointError, HpcllmError
from hpcllm.system.job import StopSignals
from hpcllm.training import loop as train_module
from hpcllm.training import saving
from hpcllm.training.summary import Summary

STEPS = 8
# the rate does not depend on run.steps, so a run may be made in parts
FLAT = {"learning_rate": 3e-3, "warmup_steps": 5, "final_fraction": 1.0}


def run_config(folder: Path, name: str = "r", steps: int = STEPS, **tables: dict[str, Any]) -> Config:
    """A run that saves after every third step, and keeps every file."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": name, "folder": str(folder), "steps": steps},
        "optimizer": FLAT,
        "communication": {"bucket_mib": 0.01, "exact_steps": 2},
        "checkpoint": {"every_steps": 3, "keep": 99},
        "data": {"validation_sequences": 2},
    }
    for table, keys in tables.items():
        base[table] = {**base.get(table, {}), **keys}
    return tiny(**base)


def run(config: Config, comm, restart: bool = False) -> Summary:
    with StopSignals() as signals:
        summary = train_module.train(config, comm, signals, restart)
    comm.Barrier()  # rank 0 has closed its log
    return summary


def folder_of(config: Config) -> Path:
    return Path(config.run.folder) / config.run.name


def records(config: Config, key: str) -> dict[int, Any]:
    """Step -> value, of the log's records that have the key."""
    lines = (folder_of(config) / "log.jsonl").read_text().splitlines()
    return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}


def contents(config: Config) -> dict[int, dict[str, bytes]]:
    """Step -> all tensors, of every checkpoint."""
    found = {}
    for path in newest_first(folder_of(config) / "checkpoints"):
        with Checkpoint.open(path) as checkpoint:
            found[step_of(path)] = {name: checkpoint.read_whole(name).tobytes() for name in checkpoint.datasets}
    return found


def cut_off_after(config: Config, step: int, comm) -> None:
    """As if the job had been killed before any later checkpoint was whole."""
    comm.Barrier()
    if comm.rank == 0:
        for path in newest_first(folder_of(config) / "checkpoints"):
            if step_of(path) > step:
                path.unlink()
    comm.Barrier()


CASES = {
    "plain": {},
    "feedback": {"communication": {"gradients": "int4:32+ef"}, "pipeline": {"recompute": "selective"}},
    "zero 1": {
        "optimizer": {"shard": "states"},
        "communication": {"gradients": "int8:32+ef", "parameters": "int4:32"},
        "pipeline": {"recompute": "full"},
    },
    "zero 2": {
        "optimizer": {"shard": "states+gradients"},
        "communication": {"gradients": "int4:32+ef"},
        "precision": {"compute": "bf16"},
    },
    "zero 3": {
        "optimizer": {"shard": "all"},
        "communication": {"gradients": "int4:32:sr+ef", "parameters": "int8:32"},
        "precision": {"compute": "fp16"},
        "pipeline": {"recompute": "selective"},
    },
    "pipeline": {"mesh": {"pp": 2}, "communication": {"gradients": "int4:32+ef", "exact": "norm,bias"}},
}


SAMPLE = {
    1: ("plain", "zero 1"),
    2: ("feedback", "zero 1", "zero 2", "zero 3"),
    3: ("feedback", "zero 3"),
    4: ("zero 2", "pipeline"),
}


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_cut_off_ends_with_the_bits_of_one_that_was_not(comm, shared_path, case, capsys):
    if case not in SAMPLE[comm.size]:
        return
    config = run_config(shared_path, **CASES[case])
    run(config, comm)
    losses, samples, files = records(config, "loss"), records(config, "samples"), contents(config)
    parallel_assert(list(files) == [8, 6, 3])
    owes = comm.size // config.mesh.pp > 1 and "+ef" in config.communication.gradients
    parallel_assert((FEEDBACK in files[6]) == owes)
    cut_off_after(config, 3, comm)
    capsys.readouterr()
    run(config, comm)
    parallel_assert("begins anew" not in capsys.readouterr().out)
    parallel_assert(records(config, "loss") == losses)
    parallel_assert(records(config, "samples") == samples)
    parallel_assert(contents(config) == files)


@pytest.mark.parallel([1, 2, 3])
def test_where_the_loop_is_cheaper_all_ranks_write_there_and_write_the_same(comm, shared_path, monkeypatch, capsys):
    """Rank 0 alone has measured it."""
    few = {"mesh": {"dp": comm.size}, "checkpoint": {"every_steps": 1, "keep": 99}}
    behind = run_config(shared_path, "behind", **few)
    run(behind, comm)

    def cheaper(self, _waited_s: float, took_s: float, in_loop: bool) -> None:
        self.behind_s.append(9.0)
        self.loop_s = took_s if in_loop else None
        self.wants_loop = comm.rank == 0 and len(self.behind_s) > 2

    monkeypatch.setattr(saving.WriteCost, "wrote", cheaper)
    in_loop = run_config(shared_path, "in_loop", **few)
    capsys.readouterr()
    run(in_loop, comm)
    said = capsys.readouterr().out
    assert (" in the loop from here on: the last took " in said.replace("\n", " ")) == (comm.rank == 0)
    assert contents(in_loop) == contents(behind)
    parallel_assert(sorted(contents(in_loop)) == list(range(1, STEPS + 1)))


@pytest.mark.parallel([1, 2, 3])
def test_what_is_written_is_what_was_there_when_the_write_began(comm, shared_path, monkeypatch):
    """Each write begins only after two more steps were made; without a thread it is the loop that writes."""
    plain = run_config(shared_path, "loop", checkpoint={"asynchronous": False, "keep": 99})
    run(plain, comm)
    steps = []

    def counted(*arguments, update=train_module.update):
        steps.append(None)
        return update(*arguments)

    def late(path, *arguments, write=background.write):
        while len(steps) < min(step_of(path) + 2, STEPS):
            time.sleep(0.001)
        return write(path, *arguments)

    monkeypatch.setattr(train_module, "update", counted)
    monkeypatch.setattr(background, "write", late)
    config = run_config(shared_path, "thread")
    summary = run(config, comm)
    parallel_assert(contents(config) == contents(plain))
    parallel_assert(summary.checkpoint.name == "step_00000008.h5")
    for key in ("checkpoint_s", "checkpoint_wait_s", "checkpoint_bytes", "checkpoint_gb_s"):
        parallel_assert(sorted(records(config, key)) == [3, 6, 8])
    size = sum(map(len, contents(config)[8].values()))
    parallel_assert(records(config, "checkpoint_bytes")[8] == size)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_write_that_fails_ends_the_run_with_its_cause(comm, shared_path, monkeypatch, asynchronous):
    """The last rank's disk fails in the second checkpoint. The first is whole, and the next start goes on from it."""
    begun = []

    def write(path, *arguments, real=background.write):
        begun.append(path)
        return real(path, *arguments)

    def broken(*arguments, write_at=writer.write_at):
        if comm.rank == comm.size - 1 and len(begun) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_at(*arguments)

    config = run_config(shared_path, checkpoint={"asynchronous": asynchronous})
    monkeypatch.setattr(background, "write", write)
    monkeypatch.setattr(writer, "write_at", broken)
    match = rf"rank {comm.size - 1}: cannot write .*step_00000006\.h5.*Input/output error"
    with pytest.raises(CheckpointError, match=match) as caught:
        run(config, comm)
    parallel_assert(caught.value.everywhere)
    parallel_assert(caught.value.exit_code == 1)
    monkeypatch.undo()
    comm.Barrier()
    parallel_assert(os.listdir(folder_of(config) / "checkpoints") == ["step_00000003.h5"])
    run(config, comm)
    straight = run_config(shared_path, "straight")
    run(straight, comm)
    parallel_assert(records(config, "loss") == records(straight, "loss"))
    parallel_assert(contents(config) == contents(straight))


@pytest.mark.parallel([1, 2])
def test_the_best_by_validation_loss_stays_and_says_its_loss(comm, shared_path):
    """A rate that is far too high after a while makes the middle of the run its best part."""
    wild = {"learning_rate": 0.5, "warmup_steps": 8, "final_fraction": 1.0}
    keep = {"keep": 1, "keep_best": 1, "every_steps": 2}
    log = {"validation_every_steps": 2}
    config = run_config(shared_path, optimizer=wild, checkpoint=keep, log=log)
    run(config, comm)
    losses = records(config, "validation_loss")
    parallel_assert(list(losses) == [2, 4, 6, 8])
    best = min(losses, key=losses.get)
    parallel_assert(best < 8)
    paths = newest_first(folder_of(config) / "checkpoints")
    parallel_assert([step_of(path) for path in paths] == [8, best])
    for path in paths:
        with Checkpoint.open(path) as checkpoint:
            parallel_assert(checkpoint.attributes["run/validation_loss"] == losses[step_of(path)])


@pytest.mark.parallel([2])
def test_a_rank_that_fails_alone_does_not_wait_for_the_others(comm, shared_path, monkeypatch):
    """What no collective has told to all ranks is raised where it is known: job.py then ends the job."""
    failed = background.Background(comm, CheckpointConfig(), lambda: None, lambda: "")

    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(background, "on_root", fails if comm.rank == 1 else lambda *_: None)
    monkeypatch.setattr(background, "prepare", lambda *_: None)
    monkeypatch.setattr(background, "write", lambda path, *_: writer.WriteReport(path, 0, 1.0))
    failed.begin(1, shared_path / "a", background.LocalSlabs({}, {}), {})

    def wait_for_it() -> None:
        while not failed.is_done:
            time.sleep(0.001)

    if comm.rank == 0:
        wait_for_it()
    else:
        with pytest.raises(MemoryError, match="no room"):
            wait_for_it()


@pytest.mark.parallel([3])
def test_the_order_of_samples_does_not_change_when_dp_does(comm, shared_path):
    """dp 2, then 3, then 1: the hashes of what was read, and to rounding the losses, are those of one rank."""
    for part, ranks in enumerate((2, 3, 1), start=1):
        some = comm.Split(0 if comm.rank < ranks else 1, comm.rank)
        if comm.rank < ranks:
            run(run_config(shared_path, "parts", 3 * part, mesh={"dp": ranks}), some)
        some.Free()
        comm.Barrier()
    alone = comm.Split(comm.rank)
    straight = run_config(shared_path, f"straight {comm.rank}", 9)
    run(straight, alone)
    alone.Free()
    parts = run_config(shared_path, "parts", 9)
    got, want = records(parts, "samples"), records(straight, "samples")
    parallel_assert(list(got) == list(range(1, 10)))
    parallel_assert(len(set(got.values())) == 9)
    parallel_assert(got == want)
    losses = [list(records(config, "loss").values()) for config in (parts, straight)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parallel([4])
def test_another_layout_goes_on_to_rounding_and_owes_nothing(comm, shared_path, capsys):
    chain = [
        {"mesh": {"dp": 2, "pp": 2}, "optimizer": {"shard": "states+gradients"}},
        {"mesh": {"dp": 2, "tp": 2, "sequence_parallel": True}, "optimizer": {"shard": "all"}},
        {"mesh": {"dp": 4}, "optimizer": {"shard": "states"}},
    ]
    # all exact, but the codec's state is kept and told apart
    wires = {"communication": {"gradients": "int8:32+ef", "exact_steps": 99}}
    for part, layout in enumerate(chain, start=1):
        config = run_config(shared_path, "chain", 3 * part, **wires, **layout)
        run(config, comm)
        said = capsys.readouterr().out
        parallel_assert(comm.rank > 0 or part == 1 or "another layout" in said)
    alone = comm.Split(comm.rank)
    straight = run_config(shared_path, f"straight {comm.rank}", 9)
    run(straight, alone)
    alone.Free()
    parallel_assert(records(config, "samples") == records(straight, "samples"))
    losses = [list(records(each, "loss").values()) for each in (config, straight)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parallel([2])
def test_feedback_that_is_not_kept_is_said_to_begin_anew(comm, shared_path, capsys):
    wires = {"communication": {"gradients": "int4:32+ef"}}
    keeps = {"feedback": False}
    config = run_config(shared_path, checkpoint=keeps, **wires)
    run(config, comm)
    parallel_assert(FEEDBACK not in contents(config)[3])
    losses = records(config, "loss")
    cut_off_after(config, 3, comm)
    for anew in (config, run_config(shared_path, **wires)):
        capsys.readouterr()
        run(anew, comm)
        said = capsys.readouterr().out
        parallel_assert(comm.rank > 0 or "error feedback begins anew, with residuals of zero: " in said)
        again = records(anew, "loss")
        parallel_assert([again[step] == losses[step] for step in (3, 4, 8)] == [True, True, False])
        cut_off_after(config, 3, comm)


@pytest.mark.parallel([1, 2, 3, 4])
def test_residuals_have_their_place_and_their_layout(comm):
    """The ranks' arrays lie one after another; whatever is otherwise, another name, length or owner, shows."""
    sizes = [3 * rank + 1 for rank in range(comm.size)]
    residuals = {f"of {comm.rank}": torch.zeros(sizes[comm.rank])}
    found = find_residuals(residuals, comm)
    parallel_assert((found.start, found.total) == (sum(sizes[: comm.rank]), sum(sizes)))
    others = [
        find_residuals({f"of {comm.rank + 1}": torch.zeros(sizes[comm.rank])}, comm),
        find_residuals({f"of {comm.rank}": torch.zeros(sizes[comm.rank] + (comm.rank == 0))}, comm),
        find_residuals({**residuals, "more": torch.zeros(2)} if comm.rank == 0 else residuals, comm),
    ]
    parallel_assert(len({found.layout, *(other.layout for other in others)}) == 4)
    parallel_assert(find_residuals(residuals, comm).layout == found.layout)
    parallel_assert(find_residuals({}, comm) is None)


@pytest.mark.parallel([1, 2, 3])
def test_residuals_that_cannot_be_restored_are_zero(comm, shared_path):
    """Not even what a damaged newer file has left in memory before it was passed over."""
    arrays = {f"of {comm.rank}": torch.full((5 + comm.rank,), 7.0)}
    residuals = find_residuals(arrays, comm)
    slabs = {slab: array.numpy().copy() for slab, array in residuals.slabs().items()}
    same = write_slabs(shared_path / "same.h5", comm, residuals.specs(), slabs, residuals.attributes())
    other = write_slabs(shared_path / "other.h5", comm, residuals.specs(), slabs, {FEEDBACK_LAYOUT: "another"})
    none = write_slabs(shared_path / "none.h5", comm, {}, {}, {})
    for report, value in [(none, 0.0), (same, 7.0), (other, 0.0), (same, 7.0)]:
        with Checkpoint.open(report.path, comm) as checkpoint:
            parallel_assert(bool(restore_residuals(checkpoint, residuals)) == (value == 0))
        parallel_assert(all((array == value).all() for array in arrays.values()))


def test_the_hash_of_samples_knows_order_and_adds_up():
    rows = np.random.default_rng(0).integers(0, 99, (12, 17))
    whole = samples_hash(rows, 100)
    for ranks in (1, 2, 3, 4, 6, 12):
        share = 12 // ranks
        parts = [samples_hash(rows[r * share : (r + 1) * share], 100 + r * share) for r in range(ranks)]
        assert sum(parts) % 2**32 == whole
    swapped = rows.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    changed = rows.copy()
    changed[5, 16] += 1
    assert len({whole, samples_hash(swapped, 100), samples_hash(changed, 100), samples_hash(rows, 101)}) == 4


def test_another_job_that_took_the_folder_keeps_its_checkpoints_to_itself(comm, shared_path, monkeypatch):
    """Without locks the later job wins: what the earlier one was writing does not get a name."""
    config = run_config(shared_path, steps=4)

    def taken(path, *arguments, write=background.write):
        (folder_of(config) / "job.txt").write_text("somebody else")
        return write(path, *arguments)

    monkeypatch.setattr(background, "write", taken)
    with pytest.raises(HpcllmError, match=r"another job \(somebody else\) has taken over"):
        run(config, comm)
    assert os.listdir(folder_of(config) / "checkpoints") == []
