"""A device measures what the CPU measures, alone and with others, whole and split."""

from __future__ import annotations

import contextlib

import pytest
from small_models import ENCODER, checkpoint_of

from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.evaluation.evaluate import evaluate
from hpcllm.evaluation.measuring import Options
from hpcllm.evaluation.tasks import parse_task
from hpcllm.mpi.mesh import open_mesh

pytestmark = pytest.mark.pretend
MODEL = ModelConfig(layers=2, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=48)


@contextlib.contextmanager
def silent(_label, _batches):
    yield lambda _: None


@pytest.mark.parallel([1, 2])
def test_figures_on_a_device_are_those_on_the_cpu(comm, shared_path):
    path, tasks = shared_path / "a model.h5", [parse_task("sort:3")]
    if comm.rank == 0:
        checkpoint_of(shared_path, MODEL).rename(path)
    comm.Barrier()
    wanted = evaluate(path, tasks, Options(problems=5, device="cpu"), None, silent)
    for axis in ("dp", "pp", "tp")[: 1 if comm.size == 1 else 3]:
        with open_mesh(comm, MeshConfig(**({"dp": 1, axis: comm.size}))) as mesh:
            found = evaluate(path, tasks, Options(problems=5, device="gpu"), mesh, silent)
        for result, other in zip(found, wanted, strict=comm.rank == 0):
            assert result.figures["acc"] == other.figures["acc"]
            assert result.figures["loss"].value == pytest.approx(other.figures["loss"].value, rel=1e-5)
