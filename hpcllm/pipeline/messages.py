"""The two ends of a message: what one rank sends is what another rank receives.

rank 0: SEND_F3   = virtual stage 0    ->   virtual stage 1 =   RECV_F3 of rank 1
rank 1: SEND_B3.1 = virtual stage 3    ->   virtual stage 2 =   RECV_B3.1 of rank 0        (loop, 2 ranks, 2 chunks)
"""

from __future__ import annotations

from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.placement import Placement

# op -> the op at the other end, and how many virtual stages further that is
OTHER_END = {
    Op.SEND_FORWARD: (Op.RECV_FORWARD, 1),
    Op.RECV_FORWARD: (Op.SEND_FORWARD, -1),
    Op.SEND_BACKWARD: (Op.RECV_BACKWARD, -1),
    Op.RECV_BACKWARD: (Op.SEND_BACKWARD, 1),
}


def other_end(placement: Placement, rank: int, message: Action) -> tuple[int, Action]:
    """Which rank of the pipeline has the other end of a SEND or RECV of `rank`, and as what: its RECV or SEND."""
    op, step = OTHER_END[message.op]
    peer, chunk = placement.home(placement.stage(rank, message.chunk) + step)
    return peer, Action(op, message.microbatch, chunk)
