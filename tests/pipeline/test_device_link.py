"""Messages between stages whose tensors are on a device, whether MPI can read its memory or not."""

from __future__ import annotations

import numpy as np
import pretend
import pytest
import torch

from hpcllm.config.schema import MeshConfig
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.message_memory import mpi_reads_devices
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.actions import Action, Op, Placement
from hpcllm.pipeline.link import BACKWARD, FORWARD, Link

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
        before = np.array(pretend.native().copies())
        if mesh.pp.rank == 0:
            link.send(Action(Op.SEND_FORWARD, 0), x)
            link.finish()
        else:
            link.receive(Action(Op.RECV_FORWARD, 0))
            link.take(Action(Op.RECV_FORWARD, 0))
        counted = np.array(pretend.native().copies()) - before
        once = [0, 1] if mesh.pp.rank == 0 else [1, 0]
        assert counted.tolist() == ([0, 0] if mpi_reads_devices() else once)
