"""A run on a device is the run on the CPU: losses, checkpoints in both directions, and the text of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import torch
from pretend.hangs import hanging
from torch.nn import functional

from hpcllm.codecs.gpu.launch import launcher_of
from hpcllm.config.schema import Config, MeshConfig
from hpcllm.errors import ConfigError
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Place, TextSettings, complete
from hpcllm.mpi.mesh import open_mesh
from hpcllm.system.job import StopSignals
from hpcllm.training import loop as train_module
from hpcllm.training.memory import STAYS, STEP, counting, measured, predicted
from hpcllm.training.run_info import start_lines
from hpcllm.training.setup import open_run
from hpcllm.training.step import forward_backward

pytestmark = pytest.mark.pretend
STEPS = 3
# as it is found out by itself, which takes seconds and has tests of its own
REACH = {"gpu_aware": "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no"}
GPT2 = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "biases": "all"}
Tables = dict[str, dict[str, Any]]

ONE: list[Tables] = [
    {"model": {**GPT2, "tied": False, "window": 5}},
    {"model": {"window": 7}, "pipeline": {"microbatches": 2, "recompute": "full"}},
    {"pipeline": {"microbatches": 3, "schedule": "zb-h1", "recompute": "selective"}},
    {"pipeline": {"microbatches": 3, "recompute": "full", "loss_tokens": 7}},
    {"precision": {"compute": "bf16"}},
]
CASES: dict[int, list[Tables]] = {
    1: [*ONE, {"precision": {"compute": "fp16"}, "optimizer": {"shard": "all"}}],
    2: [
        {"precision": {"compute": "bf16"}, "optimizer": {"shard": "states"}},
        {"optimizer": {"shard": "states+gradients"}},
        {"optimizer": {"shard": "all"}, "pipeline": {"microbatches": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"microbatches": 3, "schedule": "zb-v"}, "model": {"layers": 4}},
        {"mesh": {"tp": 2, "sequence_parallel": True}, "pipeline": {"recompute": "selective"}},
    ],
    3: [
        {"mesh": {"pp": 3}, "model": {"layers": 3}, "pipeline": {"microbatches": 4}},
        {"communication": {"gradients": "bf16"}},
    ],
    4: [
        {"mesh": {"tp": 2}, "optimizer": {"shard": "states"}, "precision": {"compute": "fp16"}},
        {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}, "model": {"tied": False}},
    ],
}


def losses(tables: Tables, device: str, comm) -> np.ndarray:
    communication = {"exact_steps": 1, **tables.get("communication", {})}
    config = small_runs.tiny(
        **{**tables, "run": {"device": device}, "communication": {"bucket_mib": 0.02, **REACH, **communication}}
    )

    def then(run):
        where = {x.device.type for x in (*run.parameters.values(), *run.gradients.shares)}
        assert where == {"cpu" if device == "cpu" else "pretend"}

    seen = small_runs.losses(config, comm, STEPS)
    small_runs.losses(config, comm, 0, then)
    return seen


@pytest.mark.parallel([1, 2, 3, 4])
def test_the_losses_are_those_of_the_cpu(comm):
    for tables in CASES[comm.size]:
        on_cpu, on_device = losses(tables, "cpu", comm), losses(tables, "gpu", comm)
        rtol = 1e-6 if tables.get("precision", {}).get("compute", "fp32") == "fp32" else 2e-3
        np.testing.assert_allclose(on_device, on_cpu, rtol=rtol, err_msg=str(tables))


@pytest.mark.parallel([1, 2])
def test_the_same_run_twice_has_the_same_bits(comm):
    tables: Tables = {"optimizer": {"shard": "states"}, "precision": {"compute": "bf16"}}
    one, other = (small_runs.losses(small_runs.tiny(**tables, communication=REACH), comm, STEPS) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def part(folder: Path, name: str, device: str, steps: int, tables: Tables, comm) -> Config:
    """Train the run `name` up to that step on that device, from where it stands."""
    config = small_runs.tiny(
        run={"name": name, "folder": str(folder), "steps": steps, "device": device},
        # the rate's cosine ends at run.steps, so both parts need a rate that does not depend on it
        optimizer={"final_fraction": 1.0, "learning_rate": 3e-3, "warmup_steps": 2, **tables.get("optimizer", {})},
        checkpoint={"every_steps": 2},
        communication={"bucket_mib": 0.02, "hash_every_steps": 2, **REACH},
        **{key: table for key, table in tables.items() if key != "optimizer"},
    )
    with StopSignals() as signals:
        train_module.train(config, comm, signals)
    comm.Barrier()  # rank 0 has closed its log
    return config


def logged(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.run.folder) / config.run.name / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def said(path: Path, place: Place) -> dict[int, str]:
    """Texts of prompts of unequal lengths."""
    settings = TextSettings(batch=BatchSettings(tokens=20), seed=1)
    return {each.prompt: each.text for each in complete(path, ["alpha", "b " * 20], settings, place)}


@pytest.mark.may_wait
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("tables", [{}, {"precision": {"compute": "bf16"}, "optimizer": {"shard": "states"}}])
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(comm, shared_path, tables):
    straight = part(shared_path, "straight", "cpu", 6, tables, comm)
    runs = []
    for name, devices in {"there": ("cpu", "gpu"), "back": ("gpu", "cpu")}.items():
        for steps, device in zip((3, 6), devices, strict=True):
            config = part(shared_path, name, device, steps, tables, comm)
        runs.append(config)
    rtol = 5e-3 if tables else 1e-6
    for config in runs:
        for key in ("loss", "validation_loss"):
            got, want = (
                [r[key] for r in logged(c) if key in r and r["step"] in (1, 2, 4, 5, 6)] for c in (config, straight)
            )
            np.testing.assert_allclose(got, want, rtol=rtol, err_msg=f"{config.run.name} {key}")
    there = next(r for r in logged(runs[0]) if r["step"] == 6 and "memory_gb" in r)
    assert 0 < there["memory_gb"] < there["host_memory_gb"]  # a small model, and an interpreter with its libraries
    if comm.rank == 0:
        told = {device: said(Path(shared_path) / "there", Place(device=device)) for device in ("cpu", "gpu", "auto")}
        assert told["cpu"] == told["gpu"] == told["auto"]
    comm.Barrier()


@pytest.mark.may_wait
@pytest.mark.parallel([2, 4])
def test_ranks_that_share_a_model_say_what_one_process_says(comm, shared_path):
    config = part(shared_path, "a", "gpu", 2, {"model": {"layers": 4}}, comm)
    path = Path(config.run.folder) / "a"
    alone = said(path, Place(device="cpu"))
    for tp in (1, 2):
        with open_mesh(comm, MeshConfig(dp=1, pp=comm.size // tp, tp=tp)) as mesh:
            assert said(path, Place(device="gpu", mesh=mesh)) == alone


@pytest.mark.parallel([1, 2])
def test_memory_is_what_was_predicted(comm):
    """By the device's own count, which also sees what an operation takes and gives back before it returns."""
    tables: Tables = {"model": {"layers": 4, "hidden": 64, "ffn": 176}, "data": {"sequence_length": 16}}
    for more in ({}, {"pipeline": {"microbatches": 3, "recompute": "selective"}}):
        with open_run(small_runs.tiny(**{**tables, **more}, communication=REACH), comm) as run:
            with counting(run, True) as live:
                small_runs.run_steps(run, 1)
            found, told = measured(run, live.peak), predicted(run)
        assert {kind: found[kind] for kind in STAYS} == {kind: told[kind] for kind in STAYS}
        assert told[STEP] < 1.3 * found[STEP], more
        assert found[STEP] < 1.6 * told[STEP] + 2**20, more


@pytest.mark.parallel([2])
def test_staged_messages_of_one_node_are_said_loudly(comm):
    said = small_runs.losses(small_runs.tiny(communication=REACH), comm, 0, start_lines)
    loud = [line for line in said if line.startswith("warning: the devices of this node exchange all messages through")]
    assert len(loud) == (REACH["gpu_aware"] == "no")
    assert all("s of each step; take an MPI built for the GPUs" in line for line in loud)


@pytest.mark.parallel([2])
def test_messages_of_a_stage_start_while_it_waits_for_weights(comm):
    """A held message starts when its event has passed, whoever waits by then; on the CPU none is held."""
    pipeline = {"microbatches": 2, "schedule": "interleaved", "chunks": 2}
    tables: Tables = {"mesh": {"pp": 2}, "pipeline": pipeline, "optimizer": {"shard": "states"}, "model": {"layers": 4}}
    for device in ("gpu", "cpu"):
        with open_run(small_runs.tiny(**tables, run={"device": device}, communication=REACH), comm) as run:
            on_device = run.optimization.worker.meanwhile == run.engine.link.advance
            assert on_device == (device == "gpu")
            small_runs.run_steps(run, 2)


@pytest.mark.parallel([1, 2])
def test_a_run_without_kernels_says_why_at_its_start(comm):
    """Whatever the reason is; on the CPU there is nothing to say."""
    said = small_runs.losses(small_runs.tiny(communication=REACH), comm, 0, start_lines)
    why = launcher_of("pretend")[1]
    assert [line for line in said if "no kernels" in line] == [f"warning: no kernels for codecs and model: {why}"]
    on_cpu = small_runs.losses(small_runs.tiny(run={"device": "cpu"}), comm, 0, start_lines)
    assert not any("no kernels" in line for line in on_cpu)


@pytest.mark.parallel([1, 2])
def test_a_device_that_hangs_ends_its_step_by_a_name_and_a_limit(comm):
    """Nothing in a step waits for the device without one, whoever waits: the program at its end, a lane, a codec."""
    config = small_runs.tiny(communication={"bucket_mib": 0.02, **REACH}, limits={"stall_s": 30.0})
    with open_run(config, comm) as run:
        small_runs.run_steps(run, 1)
        run.optimizer.settle()
        with hanging("pretend") as waits:
            forward_backward(run, 1, config.data.global_batch)
    end, message = (f"its device to end the {what}, rank {comm.rank}" for what in ("step", "work before a message"))
    assert waits.count((end, 180.0)) == 1
    assert set(waits) <= {(end, 180.0), (message, 30.0)}


@pytest.mark.parallel([1, 2])
def test_a_run_computes_on_one_stream_which_is_not_the_default_one(comm):
    """Whatever a library copies without a stream does not wait behind a step; fixture no_races asks for the order."""
    seen = set()
    for _ in range(2):
        with open_run(small_runs.tiny(communication=REACH), comm) as run:
            small_runs.run_steps(run, 1)
            seen.add(torch.accelerator.current_stream(run.device).stream_id)
    assert len(seen) == 1
    assert seen != {0}


@pytest.mark.parallel([1, 2])
def test_a_window_is_made_once_and_grouped_queries_have_their_own_keys(comm, monkeypatch):
    """One mask for all layers, microbatches and steps, in the type of the scores; what a fused kernel can take."""
    masks, kinds, attend = set(), set(), functional.scaled_dot_product_attention

    def counted(q, k, v, *, attn_mask, is_causal, enable_gqa):
        masks.add(attn_mask.data_ptr())
        kinds.add((attn_mask.dtype, q.shape == k.shape == v.shape, is_causal, enable_gqa))
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    tables: Tables = {"model": {"window": 5}, "precision": {"compute": "bf16"}, "pipeline": {"microbatches": 3}}
    config = small_runs.tiny(**tables, communication=REACH)
    said = small_runs.losses(config, comm, STEPS, start_lines)
    assert len(masks) == 1
    assert kinds == {(torch.bfloat16, True, False, False)}
    heads = "keys and values repeated for each query head"
    assert f"note: the window of 5 tokens takes a mask of 16 x 16, {heads}: no flash kernel has it" in said


TRAVELS: dict[str, Tables] = {  # where each kind of traffic is some
    "gradients": {},
    "parameters": {"optimizer": {"shard": "states"}},
    "forward": {"mesh": {"pp": 2}},
    "backward": {"mesh": {"pp": 2}},
    "tensor": {"mesh": {"tp": 2}},
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("traffic", TRAVELS)
def test_a_codec_without_kernels_is_rejected_before_any_work(comm, traffic):
    tables = TRAVELS[traffic] | {"communication": {traffic: "exp", **REACH}}
    config = small_runs.tiny(**tables)
    with pytest.raises(ConfigError, match=f"communication.{traffic} = 'exp' .*valid: raw"), open_run(config, comm):
        pass


@pytest.mark.full(reason="three commands that start PyTorch, a sixth of a minute")
def test_a_run_from_the_command_line_says_what_it_computes_on(tmp_path):
    store = small_runs.store()
    (tmp_path / "a run.toml").write_text(
        f"""[run]
name = "r"
folder = "{tmp_path}"
steps = 2
[data]
store = "{store}"
sequence_length = 16
global_batch = 2
validation_sequences = 2
[log]
every_steps = 1
"""
    )
    told = cli("train", tmp_path / "a run.toml", "--wide")
    assert "pretend a rank, 1 thread(s) a rank" in told
    assert " GB on the device, " in told
    told = cli("generate", tmp_path / "r", "--prompt", "alpha", "--tokens", "5", "--seed", "1")
    assert told == cli(
        "generate", tmp_path / "r", "--prompt", "alpha", "--tokens", "5", "--seed", "1", "--device", "cpu"
    )


def cli(*words: object) -> str:
    """What a command says, in a process that gets the device by itself (pretend/autoload.py)."""
    command = [sys.executable, "-m", "hpcllm", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
