"""Damaged bytes that a device has decoded end the step that decoded them: words of all streams are read with the loss.

By emulated kernels; decoding waits for nothing, so nobody else would ever tell of a stage that only receives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import emulated
import pytest
import small_runs
import torch
from pretend.hangs import hanging
from pretend.kernels import emulated_kernels

from hpcllm.codecs.gpu.device_codecs import TileKernels, damage_words
from hpcllm.errors import CodecError
from hpcllm.training.setup import open_run
from hpcllm.training.step import forward_backward

pytestmark = [pytest.mark.pretend, pytest.mark.skipif(bool(emulated.why_not()), reason=emulated.why_not())]
DEVICE = "pretend"
RECORD = slice(16, 24)  # of the first tile, behind the header


@pytest.fixture
def kernels() -> Iterator[None]:
    """Emulated kernels for the device."""
    with emulated_kernels():
        yield


@pytest.mark.parallel([1])
def test_each_stream_has_a_word_of_its_own():
    codec, values = emulated.emulated("exp", torch.float32), torch.linspace(-1, 1, 3000, device=DEVICE)
    assert isinstance(codec, TileKernels)
    data = codec.encode(values, torch.empty(codec.encoded_bytes(3000), dtype=torch.uint8, device=DEVICE)).clone()
    bad, lane = data.clone(), torch.Stream(values.device)
    bad[RECORD] = 253
    event = torch.Event(values.device)
    event.record()
    event.wait(lane)
    with lane:
        codec.decode(bad, torch.empty(3000, device=DEVICE))
    codec.decode(data, torch.empty(3000, device=DEVICE))
    assert codec.used_bytes(data, 3000) == data.numel()  # of its own stream: sound
    words = [word for of, word in damage_words(values.device) if of == codec]
    assert sorted(int(word.item()) for word in words) == [0, 1]
    for word in words:
        word.zero_()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["exp", "mpc"])
@pytest.mark.usefixtures("kernels", "device_messages")
def test_a_stage_that_waits_for_a_length_from_its_device_has_a_name_and_a_limit(comm, codec):
    communication = {"forward": codec, "backward": codec, "exact_steps": 0}
    communication["gpu_aware"] = "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no"
    limits, pipeline = {"stall_s": 30.0}, {"microbatches": 2}
    config = small_runs.tiny(mesh={"pp": 2}, pipeline=pipeline, communication=communication, limits=limits)
    with open_run(config, comm) as run:
        small_runs.run_steps(run, 1)
        with hanging(DEVICE) as waits:
            forward_backward(run, 1, config.data.global_batch)
    message = f"its device to end the work before a message, rank {comm.rank}"
    assert waits.count((message, 30.0)) >= 2
    assert "" not in {name for name, _ in waits}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["exp", "mpc"])
@pytest.mark.usefixtures("kernels", "device_messages")
def test_damaged_activations_end_their_step(comm, monkeypatch, codec):
    communication = {"forward": codec, "exact_steps": 0, "bucket_mib": 0.02}
    communication["gpu_aware"] = "yes" if os.environ.get("HPCLLM_PRETEND") == "open" else "no"
    config = small_runs.tiny(mesh={"pp": 2}, pipeline={"microbatches": 1}, communication=communication)
    decode = TileKernels.decode

    def damaged(self: TileKernels, data: torch.Tensor, out: torch.Tensor) -> None:
        bad = data.clone()
        bad[RECORD] = 253
        decode(self, bad, out)

    with open_run(config, comm) as run:
        small_runs.run_steps(run, 2)
        monkeypatch.setattr(TileKernels, "decode", damaged)
        if run.mesh.pp.rank == 1:
            with pytest.raises(CodecError, match=f"^rank {comm.rank}: {codec}: tile .* is damaged"):
                forward_backward(run, 2, 24)
        else:
            forward_backward(run, 2, 24)
        monkeypatch.setattr(TileKernels, "decode", decode)
        for _, word in damage_words(run.device):
            word.zero_()
