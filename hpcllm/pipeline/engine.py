"""The engine: one flat loop that runs the actions of one rank, whatever the schedule.

    RECV_F3 ...> F3 ---> SEND_F3          between two chunks of one rank:   F3 ---> F3.1     handed over,
    RECV_B3 ...> B3 ---> SEND_B3                                            B3 <--- B3.1     not a message

The loop knows no schedule by name and no stage by its place: both are in the actions. A buffer that something was
received into goes back to the link as soon as the work that reads it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from hpcllm.model.documents import Documents
from hpcllm.model.loss import Criterion
from hpcllm.pipeline.actions import Action, Op, other_end
from hpcllm.pipeline.chunk import TOTAL, Chunk
from hpcllm.pipeline.link import Link
from hpcllm.pipeline.schedules import Schedule
from hpcllm.system.device import synchronize

T = TypeVar("T")
Record = Callable[[str, str, float, float], None]  # "compute" or "wait", a name, start and end by perf_counter


@dataclass
class Engine:
    """Runs the actions of a schedule: the microbatches of one step through the chunks of one rank."""

    chunks: Sequence[Chunk]
    link: Link
    added: Callable[[torch.Tensor], None] = lambda _: None  # called with each parameter whose .grad a W has added to
    record: Record | None = None
    peak_live: int = 0  # activations of a microbatch in a chunk, the most that were kept at once in the last run
    _split: frozenset[tuple[int, int]] = frozenset()  # (microbatch, chunk) whose backward pass comes in two halves
    _here: dict[Action, torch.Tensor] = field(
        default_factory=dict
    )  # RECV -> tensor that another chunk of this rank handed over
    _taken: dict[Action, torch.Tensor] = field(default_factory=dict)  # RECV -> tensor to be given back to the link
    _outgoing: dict[Action, torch.Tensor] = field(default_factory=dict)  # SEND -> tensor to be sent

    def set_exact(self, exact: bool) -> None:
        """Switch the codecs between stages and inside split layers off (True) or on; the same on all ranks."""
        self.link.exact = exact
        for chunk in self.chunks:
            chunk.decoder.exact = exact

    def run(
        self,
        schedule: Schedule,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        documents: Sequence[Documents | None] = (),
        criteria: Sequence[Criterion] = (),
    ) -> torch.Tensor:
        """Run a checked schedule over inputs and targets (microbatches, size, sequence) int64. Raises StallError.

        Gradients of `scale` times the summed loss are added to the parameters' .grad; a target of loss.IGNORED does
        not count. documents: of each microbatch, known to every stage without a message; (): rows are whole. criteria:
        of each microbatch, of one size, which say what the loss is; (): the sum of all targets'.
        Collective over the pipeline and its tp ranks. Returns the summed loss and figures, (size of the criteria,)
        float64 on the device of the chunks; 0 on all ranks but tp rank 0 of the last stage. Work on a device may still
        be under way: whoever reads the loss waits for it.
        """
        actions = schedule.actions[self.link.mesh.pp.rank]
        self._split = frozenset((a.microbatch, a.chunk) for a in actions if a.op is Op.BACKWARD_INPUT)
        self.peak_live = 0
        for chunk in self.chunks:
            chunk.begin(criteria[0].size if criteria else TOTAL.size)
        for action in actions:
            self.link.advance()
            match action.op:
                case Op.RECV_FORWARD | Op.RECV_BACKWARD:
                    self.link.receive(action)
                case Op.SEND_FORWARD | Op.SEND_BACKWARD:
                    self.link.send(action, self._outgoing.pop(action))
                case Op.FORWARD:
                    m = action.microbatch
                    inside, criterion = documents[m] if documents else None, criteria[m] if criteria else TOTAL
                    self._forward(action, inputs[m], targets[m], scale, inside, criterion)
                case Op.BACKWARD | Op.BACKWARD_INPUT:
                    self._backward(action)
                case Op.BACKWARD_WEIGHT:
                    self._weights(action)
        self._timed("wait", "sends", self.link.finish)
        return torch.stack([chunk.sums for chunk in self.chunks]).sum(0)

    def _forward(
        self,
        action: Action,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        documents: Documents | None,
        criterion: Criterion,
    ) -> None:
        m, chunk = action.microbatch, self.chunks[action.chunk]
        is_first, is_last = chunk.decoder.span.has_embedding, chunk.decoder.span.has_head
        receive = Action(Op.RECV_FORWARD, m, action.chunk)
        x = tokens if is_first else self._arrived(receive)
        split = (m, action.chunk) in self._split
        work = partial(chunk.forward, m, x, targets, scale, split, documents, criterion)
        output = self._timed("compute", str(action), work)
        self.peak_live = max(self.peak_live, sum(chunk.live for chunk in self.chunks))
        if not is_last:
            self._pass_on(Action(Op.SEND_FORWARD, m, action.chunk), output)
        if not torch.is_grad_enabled():
            self._release(receive)  # no backward pass will ask for it

    def _backward(self, action: Action) -> None:
        m, chunk = action.microbatch, self.chunks[action.chunk]
        receive = Action(Op.RECV_BACKWARD, m, action.chunk)
        gradient = None if chunk.decoder.span.has_head else self._arrived(receive)
        input_gradient = self._timed("compute", str(action), lambda: chunk.backward(m, gradient))
        if action.op is Op.BACKWARD:
            self._release(receive)
        self._release(Action(Op.RECV_FORWARD, m, action.chunk))  # W reads what the first norm made of it, not it
        if input_gradient is not None:
            self._pass_on(Action(Op.SEND_BACKWARD, m, action.chunk), input_gradient)

    def _weights(self, action: Action) -> None:
        chunk = self.chunks[action.chunk]
        self._timed("compute", str(action), lambda: chunk.weights(action.microbatch, self.added))
        # not at I: through the residual path the last layer's output gradient is what was received, not a copy
        self._release(Action(Op.RECV_BACKWARD, action.microbatch, action.chunk))

    def _arrived(self, receive: Action) -> torch.Tensor:
        """Return the tensor of a RECV, or the one that another chunk of this rank has handed over in its place."""
        if receive in self._here:
            return self._here.pop(receive)
        self._taken[receive] = self._timed("wait", str(receive), lambda: self.link.take(receive))
        return self._taken[receive]

    def _pass_on(self, send: Action, tensor: torch.Tensor) -> None:
        """Keep a tensor for its SEND, or hand it over if the next virtual stage is on this rank."""
        peer, receive = other_end(self.link.placement, self.link.mesh.pp.rank, send)
        if peer == self.link.mesh.pp.rank:
            self._here[receive] = tensor
        else:
            self._outgoing[send] = tensor

    def _release(self, receive: Action) -> None:
        """Give the memory of a RECV back to the link, if it was one."""
        if receive in self._taken:
            self.link.release(self._taken.pop(receive))

    def _timed(self, kind: str, what: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        if self.record:
            synchronize(self.chunks[0].decoder.device)  # else the work would only have been handed to it
            self.record(kind, what, start, time.perf_counter())
        return result
