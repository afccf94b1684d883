"""perf/peer_steps.py: variants take turns, other training is rejected, PyTorch's peers train what one rank trains."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_jobs import environment

ROOT = Path(__file__).parents[2]
PERF = ROOT / "perf"
SHARDING = ("fp32", "fsdp", "fsdp-once", "tp")
STEPS_OF_ALL = """
import sys
from pathlib import Path
import plain_torch
world = plain_torch.MPI.COMM_WORLD
for hook in ("", *sys.argv[2].split(",")):
    run = plain_torch.plain_loop(Path(sys.argv[1]), sys.argv[3:], 6, hook)
    of_ranks = world.gather(run.losses)
    if of_ranks:
        print("losses", hook, *(sum(losses) / len(losses) for losses in zip(*of_ranks)), sep=";", flush=True)
plain_torch.leave()
"""


@pytest.fixture(scope="module")
def steps():
    sys.path.insert(0, str(PERF))
    yield importlib.import_module("peer_steps")
    sys.path.remove(str(PERF))


def a_turn(variant: str, seconds: float = 1.0, losses=(3.0, 2.5), model: str = "tiny") -> dict:
    where = {"place": "node", "cores": 2, "mpi": "mpich", "others_share": 0.0}
    return where | {"model": model, "variant": variant, "losses": list(losses), "seconds": [seconds] * 3}


@given(done=st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from("abc")), max_size=9), repeats=st.integers(1, 4))
def test_a_campaign_that_was_cut_off_ends_with_as_many_turns_of_each(steps, done, repeats):
    turns = [a_turn(variant, model=model) for model, variant in done]
    added = steps.missing("node", ["m", "n"], ["a", "b", "c"], turns, repeats)
    before, after = Counter(done), Counter(done + added)
    assert all(after[each] == max(repeats, before[each]) for each in [(m, v) for m in "mn" for v in "abc"])
    assert steps.missing("1gbit", ["m"], ["a"], turns, repeats) == [("m", "a")] * repeats


def test_a_fresh_campaign_goes_to_and_fro(steps):
    there = [("m", "a"), ("m", "b"), ("n", "a"), ("n", "b")]
    assert steps.missing("node", ["m", "n"], ["a", "b"], [], 3) == [*there, *there[::-1], *there]


@pytest.mark.parametrize("place", ["node", "1gbit"])
def test_ours_without_codecs_comes_first_for_losses_are_compared_with_it(steps, place):
    first = steps.variants(place, picotron=True)[0]
    assert [c.coded for c in steps.COMPARISONS[place] if c.ours == first] == [False]
    assert len(set(steps.variants(place, True))) == len(steps.variants(place, True))


def test_a_peer_that_trains_something_else_is_rejected(steps):
    ours = a_turn("dp=2", losses=(3.0, 2.5, 2.0))
    steps.check_same_training(a_turn("DDP", losses=(3.0001, 2.5)), [ours])
    steps.check_same_training(a_turn("DDP", losses=(9.0,), model="30m"), [ours])
    steps.check_same_training(a_turn(steps.ALONE, losses=(9.0,)), [ours])
    with pytest.raises(SystemExit, match="other training"):
        steps.check_same_training(a_turn("DDP", losses=(3.0, 2.51)), [ours])


def test_what_is_slower_than_its_peer_is_bold(steps):
    turns = [a_turn("dp=2", 1.0), a_turn("DDP", 2.0), a_turn(f"DDP{steps.KEPT}", 0.5), a_turn(steps.ALONE, 0.8)]
    (row,) = steps.table(turns).splitlines()[2:]
    assert "| 2.00 (2.00 to 2.00) | **0.50** (0.50 to 0.50) |" in row
    assert "| 1.25 |" in row
    assert "FSDP2" not in steps.page(turns)


@pytest.mark.full(reason="a job of two ranks that imports all of PyTorch's parallelism; a sixth of a minute")
def test_every_peer_of_pytorch_trains_what_one_rank_trains():
    from small_runs import store

    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists() and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun on this machine")
    keys = {"data.store": str(store()), "data.sequence_length": 16, "data.global_batch": 4, "mesh.pp": 1}
    keys |= {"model.layers": 2, "model.hidden": 32, "model.ffn": 48, "model.kv_heads": 2, "model.tied": False}
    keys |= {"pipeline.microbatches": 1, "data.document_mask": False, "run.steps": 6}
    # with so large an epsilon an update is about as long as the gradient, so that its scale and its norm show
    keys |= {
        "optimizer.epsilon": 0.1,
        "optimizer.learning_rate": 0.5,
        "optimizer.warmup_steps": 1,
        "optimizer.clip_norm": 0.5,
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    run_file = ROOT / "jobscripts" / "local" / "tiny.toml"
    command = [sys.executable, "-c", STEPS_OF_ALL, str(run_file), ",".join(SHARDING), *settings]
    done = subprocess.run(
        ["bash", str(ROOT / "jobscripts" / "local" / "mpirun.sh"), "2", *command],
        env=environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(PERF)])},
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    lines = (line.split(";")[1:] for line in done.stdout.splitlines() if line.startswith("losses;"))
    found = {hook: [float(loss) for loss in losses] for hook, *losses in lines}
    alone = found.pop("")
    assert set(found) == set(SHARDING)
    assert alone[-1] < alone[0] - 0.05
    for hook, losses in found.items():
        assert losses == pytest.approx(alone, abs=1e-4), hook
