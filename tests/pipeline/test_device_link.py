"""Messages between stages whose tensors are on a device, whether MPI can read its memory or not."""

from __future__ import annotations

import itertools

import pytest
import torch
from pretend.counts import counting

from hpcllm.config.schema import MeshConfig
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.message_memory import mpi_reads_devices
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.link import BACKWARD, FORWARD, SPARES, Link

pytestmark = [pytest.mark.pretend, pytest.mark.usefixtures("device_messages")]
DEVICE = "pretend"  # as text: there is no such device in a process that has not started it
SHAPE = (2, 16, 96)


def microbatch(m: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(m)).bfloat16()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16"])
def test_what_is_taken_is_what_was_sent(comm, codec):
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        peer = 1 - mesh.pp.rank
        codecs = {(way, peer): codec for way in (FORWARD, BACKWARD)}
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), codecs, torch.bfloat16, torch.device(DEVICE, 0))
        ours, theirs = (Op.SEND_FORWARD, Op.RECV_BACKWARD) if mesh.pp.rank == 0 else (Op.SEND_BACKWARD, Op.RECV_FORWARD)
        for round_ in range(3):  # buffers are used again
            here = [10 * round_ + m for m in range(3)]
            for m in range(3):
                link.receive(Action(theirs, m))
                link.send(Action(ours, m), microbatch(100 * mesh.pp.rank + here[m]).to(DEVICE))
            for m in (2, 0, 1):
                taken = link.take(Action(theirs, m))
                want = microbatch(100 * peer + here[m])
                assert taken.device.type == DEVICE
                assert torch.equal(taken.cpu(), want if codec != "fp16" else want.half().bfloat16())
                link.release(taken)
            link.finish()


@pytest.mark.parallel([2])
def test_a_staged_tensor_is_copied_once_each_way(comm):
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), {}, torch.float32, torch.device(DEVICE, 0))
        x = torch.ones(SHAPE, device=DEVICE)
        with counting() as counts:
            if mesh.pp.rank == 0:
                link.send(Action(Op.SEND_FORWARD, 0), x)
                link.finish()
            else:
                link.receive(Action(Op.RECV_FORWARD, 0))
                link.take(Action(Op.RECV_FORWARD, 0))
        once = [(0, 0), (1, x.nbytes)]
        expected = [(0, 0), (0, 0)] if mpi_reads_devices() else once[:: 1 - 2 * mesh.pp.rank]
        assert [counts.to_device, counts.to_host] == expected


class LateEvent:
    """An event of a device that is busy until `ready`; it may be asked, and never waited for."""

    ready = False
    kind = torch.Event

    def __init__(self, device=None, enable_timing=False) -> None:
        self.event = self.kind(device, enable_timing=enable_timing)

    def record(self, stream=None) -> None:
        self.event.record(stream)

    def query(self) -> bool:
        return self.ready and self.event.query()

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_busy_device_holds_messages_and_not_the_host(comm, monkeypatch, codec):
    monkeypatch.setattr(torch, "Event", LateEvent)
    monkeypatch.setattr(LateEvent, "ready", False)
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        peer = 1 - mesh.pp.rank
        codecs = {(way, peer): codec for way in (FORWARD, BACKWARD)}
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), codecs, torch.bfloat16, torch.device(DEVICE, 0))
        ours, theirs = (Op.SEND_FORWARD, Op.RECV_BACKWARD) if mesh.pp.rank == 0 else (Op.SEND_BACKWARD, Op.RECV_FORWARD)
        for m in range(3):
            link.receive(Action(theirs, m))
            link.send(Action(ours, m), microbatch(10 * mesh.pp.rank + m).to(DEVICE))
        assert not any(message.requests for message in (*link.leaving, *link.coming.values()))
        LateEvent.ready = True
        for m in range(3):
            taken = link.take(Action(theirs, m))
            assert torch.equal(taken.cpu(), microbatch(10 * peer + m))
            link.release(taken)
        link.finish()
        assert not link.held


@pytest.mark.parallel([2])
def test_a_buffer_given_back_is_not_the_next_to_be_filled(comm):
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), {}, torch.float32, torch.device(DEVICE, 0))
        landings = []
        for m in range(8):
            if mesh.pp.rank == 0:
                link.send(Action(Op.SEND_FORWARD, m), torch.full(SHAPE, float(m), device=DEVICE))
                link.finish()
            else:
                link.receive(Action(Op.RECV_FORWARD, m))
                landings.append(link.coming[Action(Op.RECV_FORWARD, m)].data.data_ptr())
                link.release(link.take(Action(Op.RECV_FORWARD, m)))
        for first, second in itertools.pairwise(landings):
            assert first != second
        assert mesh.pp.rank == 0 or len(set(landings)) == 1 + SPARES  # and memory is bounded


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "fp16"])
def test_a_buffer_that_was_sent_may_be_the_next_to_be_filled(comm, codec):
    """What comes is decoded, and not what was encoded there: one message one way, then more than the pool has back."""
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        codecs = {(way, 1 - mesh.pp.rank): codec for way in (FORWARD, BACKWARD)}
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), codecs, torch.bfloat16, torch.device(DEVICE, 0))
        for round_ in range(2):
            messages = [
                (Op.SEND_FORWARD, Op.RECV_FORWARD, 0),
                *[(Op.SEND_BACKWARD, Op.RECV_BACKWARD, m) for m in range(8)],
            ]
            for number, (send, receive, m) in enumerate(messages):
                content = microbatch(10 * round_ + number)
                if (mesh.pp.rank == 0) == (send == Op.SEND_FORWARD):
                    link.send(Action(send, m), content.to(DEVICE))
                    link.finish()
                else:
                    link.receive(Action(receive, m))
                    taken = link.take(Action(receive, m))
                    assert torch.equal(taken.cpu(), content if codec == "raw" else content.half().bfloat16())
                    link.release(taken)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("codec", ["raw", "fp16"])
def test_a_buffer_is_filled_again_once_the_device_has_read_it(comm, codec):
    """The host waits for nothing between a take and the next receives: the device reads when it comes to it."""
    with open_mesh(comm, MeshConfig(pp=2)) as mesh:
        codecs = {(FORWARD, 1 - mesh.pp.rank): codec}
        link = Link(mesh, Placement(2, 1), SHAPE, Waits(60.0), codecs, torch.bfloat16, torch.device(DEVICE, 0))
        sums = []
        for m in range(4 * (1 + SPARES)):
            if mesh.pp.rank == 0:
                link.send(Action(Op.SEND_FORWARD, m), torch.full(SHAPE, float(m), device=DEVICE).bfloat16())
            else:
                link.receive(Action(Op.RECV_FORWARD, m))
                taken = link.take(Action(Op.RECV_FORWARD, m))
                sums.append(taken.float().mean())
                link.release(taken)
        link.finish()
        assert [mean.item() for mean in sums] == list(range(len(sums)))
