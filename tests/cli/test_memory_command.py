"""`python -m hpcllm memory`: answers without MPI and torch, and refuses by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_stores import write_store

from hpcllm.cli.main import main
from hpcllm.config.schema import parse
from hpcllm.model.shapes import parameter_count, parameter_shapes, split_dim
from hpcllm.plan.memory.predict import predict
from hpcllm.plan.resolve import check_layout, run_schedule

RUN = """
[model]
preset = "gpt2-124m"
vocabulary = 50257
[data]
sequence_length = 1024
global_batch = 32
[pipeline]
microbatches = 8
"""


SHAPES = parameter_shapes(parse(RUN).model)


@pytest.fixture
def run_file(tmp_path) -> Path:
    path = tmp_path / "a run.toml"
    path.write_text(RUN)
    return path


def asked(capsys, run_file: Path, *arguments: str) -> dict:
    assert main(["memory", str(run_file), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_states_add_up_over_every_layout(capsys, run_file):
    """Each parameter is on every replica, and once in a replica; a tied embedding on both ends of the pipeline."""
    n = parameter_count(parse(RUN).model)
    for dp, pp, tp in [(1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, 2), (1, 1, 4)]:
        sizes = {"dp": dp, "pp": pp, "tp": tp}
        facts = asked(capsys, run_file, *(f"--set=mesh.{axis}={size}" for axis, size in sizes.items()))
        ranks = [(row, rank) for row in facts["ranks"] for rank in row["ranks"]]
        assert sorted(rank for _, rank in ranks) == list(range(dp * pp * tp))
        whole = [row for row, _ in ranks]
        norms = dp * (tp - 1) * sum(math.prod(shape) for name, shape in SHAPES.items() if split_dim(name) is None)
        again = dp * 50257 * 768 * (pp > 1)
        assert sum(row["parameters_bytes"] for row in whole) == 4 * (dp * n + again + norms)
        for row in whole:
            assert row["gradients_bytes"] == row["parameters_bytes"]
            assert row["optimizer_bytes"] == 2 * row["parameters_bytes"]


@pytest.mark.parametrize(
    ("shard", "parts"),
    [("none", (1, 1, 1)), ("states", (1, 1, 4)), ("states+gradients", (1, 4, 4)), ("all", (4, 4, 4))],
)
@pytest.mark.parametrize(("compute", "item_bytes", "states"), [("fp32", 4, 8), ("bf16", 2, 12), ("fp16", 2, 12)])
def test_replicas_share_what_the_shard_level_says(shard, parts, compute, item_bytes, states):
    config = parse(RUN, [f"optimizer.shard={shard}", f"precision.compute={compute}", "mesh.dp=4"])
    config = check_layout(config, 4)
    memory = predict(config, run_schedule(config, ""), 0)
    n = parameter_count(config.model)
    for size, bytes_each, share in zip(
        (memory.parameters, memory.gradients, memory.optimizer), (item_bytes, 4, states), parts, strict=True
    ):
        assert size == pytest.approx(n * bytes_each / share, rel=1e-6)


def test_recomputation_pieces_and_splits_lower_the_activations(capsys, run_file):
    def activations(*arguments: str) -> int:
        return max(row["activations_bytes"] for row in asked(capsys, run_file, *arguments)["ranks"])

    plain = activations()
    selective, full = (activations("--set", f"pipeline.recompute={level}") for level in ("selective", "full"))
    assert full < selective < plain
    assert activations("--set", "pipeline.loss_tokens=256") < plain
    assert activations("--set", "pipeline.microbatches=32") < plain
    split, sequence = (activations("--set=mesh.tp=4", f"--set=mesh.sequence_parallel={on}") for on in ("false", "true"))
    assert sequence < split < plain


def test_the_table_names_ranks_and_what_binds(capsys, run_file):
    assert main(["memory", str(run_file), "--ranks", "4", "--set", "mesh.pp=2"]) == 0
    text = capsys.readouterr().out
    assert "stage 0 (ranks 0-1)" in text
    assert "stage 1 (ranks 2-3)" in text
    assert "need most" in text
    assert "pipeline.recompute" in text


def test_the_vocabulary_may_come_from_the_store(capsys, run_file, tmp_path):
    write_store(tmp_path / "store.h5", vocabulary=50257)
    want = asked(capsys, run_file)
    got = asked(capsys, run_file, "--set", "model.vocabulary=0", "--set", f"data.store={tmp_path / 'store.h5'}")
    assert got == want


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "model.vocabulary=0"], "model.vocabulary = 0 takes its vocabulary; set one of the two"),
        (["--set", "model.vocabulary=0", "--set", "data.store=none.h5"], "model.vocabulary can be given instead"),
        (["--set", "mesh.tp=5"], "mesh.tp = 5 does not divide model.heads = 12"),
        (["--ranks", "0"], "--ranks: '0' is no count; valid: 1 to"),
        (["--ranks", "6", "--set", "mesh.pp=4"], "does not divide the 6 ranks"),
        (["--set", "pipeline.microbatches=7"], "pipeline.microbatches = 7"),
        (["--set", "pipeline.recompute=full,none"], "pipeline.recompute"),
    ],
)
def test_mistakes_are_named(capsys, run_file, arguments, told):
    assert main(["memory", str(run_file), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_neither_torch_nor_mpi_is_loaded(run_file):
    program = (
        "import sys; from hpcllm.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) + 2 * ('mpi4py' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, "memory", str(run_file)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
