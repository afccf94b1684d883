"""Whatever computes on a device does so on a stream of its own: a library's copies, on the default one, do not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from small_models import ENCODER, checkpoint_of
from torch.utils._python_dispatch import TorchDispatchMode

from hpcllm.config.schema import MeshConfig, ModelConfig
from hpcllm.evaluation.evaluate import evaluate
from hpcllm.evaluation.measuring import Options
from hpcllm.evaluation.tasks import parse_task
from hpcllm.inference.complete import BatchSettings
from hpcllm.inference.generate import Place, TextSettings, complete
from hpcllm.mpi.mesh import open_mesh
from hpcllm.perf.session import find_device
from hpcllm.preflight import matrix

pytestmark = pytest.mark.pretend
MODEL = ModelConfig(layers=2, hidden=24, heads=4, kv_heads=2, ffn=16, vocabulary=ENCODER.vocabulary, max_sequence=48)


class Streams(TorchDispatchMode):
    """Notes the stream of each operation that has a tensor of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, operation, _, arguments=(), words=None):
        result = operation(*arguments, **(words or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "pretend":
            self.seen.add(torch.accelerator.current_stream().stream_id)
        return result


def on_default_stream(call: Callable[[], object]) -> set[int]:
    """Streams that a program uses which begins, as a new process does, on the default one."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    before = torch.accelerator.current_stream()
    before.synchronize()
    default = torch.Stream(stream_id=0, device_index=0, device_type=before.device_type)
    assert default.stream_id == 0
    torch.accelerator.set_stream(default)
    with Streams() as streams:
        call()
    return streams.seen


@contextlib.contextmanager
def silent(_label, _batches):
    yield lambda _: None


@pytest.mark.may_wait
@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("axis", ["", "tp", "pp"])
def test_text_and_figures_are_computed_on_one_stream_which_is_not_the_default_one(comm, shared_path, axis):
    path = shared_path / "a model.h5"
    if comm.rank == 0:
        checkpoint_of(shared_path, MODEL).rename(path)
    comm.Barrier()
    settings = TextSettings(batch=BatchSettings(tokens=3), seed=1)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(open_mesh(comm, MeshConfig(**{"dp": 1, axis: comm.size}))) if axis else None
        texts = on_default_stream(lambda: list(complete(path, ["alpha"], settings, Place(device="gpu", mesh=mesh))))
        options = Options(problems=2, device="gpu")
        figures = on_default_stream(lambda: evaluate(path, [parse_task("sort:3")], options, mesh, silent))
    assert len(texts) == len(figures) == 1
    assert 0 not in texts | figures


@pytest.mark.parallel([1])
def test_what_is_measured_is_on_one_too(monkeypatch):
    monkeypatch.setattr(matrix, "BUDGET_S", 0.01)

    class Asked:
        device = "gpu"

    streams = on_default_stream(lambda: matrix.gflop_s(find_device(Asked(), 0), budget_s=0.01))
    assert len(streams) == 1
    assert streams != {0}
