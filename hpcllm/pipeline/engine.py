"""The engine: one flat loop that runs any schedule of one stage.

    tokens --> F m --> SEND_F m --> ... --> last stage: F m is the loss --> B m --> SEND_B m --> ... --> B m on stage 0

What a stage keeps between F m and B m is one pair (input, output); it is freed by B m, or at once in validation. Which
rank is first or last stands in the schedule's messages and in what the stage computes, not in branches of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from hpcllm.model.loss import cross_entropy_sum
from hpcllm.model.transformer import Decoder
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.link import Link


@dataclass
class Engine:
    """Runs the microbatches of one step through one stage."""

    decoder: Decoder
    link: Link
    _inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _to_send: dict[int, torch.Tensor] = field(default_factory=dict)
    _loss: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def run(
        self,
        actions: Iterable[Action],
        inputs: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        before_backward: Callable[[int], None] = lambda _: None,
    ) -> float:
        """Run a schedule over inputs and targets (microbatches, size, sequence) int64. Raises StallError.

        Gradients of `scale` times the summed loss are added to the parameters' .grad; a target of loss.IGNORED does
        not count. before_backward(m) is called before the backward pass of microbatch m. Returns the summed loss; 0 on
        all but the last stage.
        """
        self._loss.zero_()
        for action in actions:
            m = action.microbatch
            match action.op:
                case Op.RECV_FORWARD:
                    self.link.receive(Op.FORWARD, m)
                case Op.FORWARD:
                    self._forward(m, inputs[m], targets[m], scale)
                case Op.SEND_FORWARD:
                    keep = torch.is_grad_enabled()
                    self.link.send(Op.FORWARD, m, self._outputs[m] if keep else self._outputs.pop(m))
                case Op.RECV_BACKWARD:
                    self.link.receive(Op.BACKWARD, m)
                case Op.BACKWARD:
                    before_backward(m)
                    self._backward(m)
                case Op.SEND_BACKWARD:
                    self.link.send(Op.BACKWARD, m, self._to_send.pop(m))
        self.link.finish()
        self._outputs.clear()  # losses that had no backward pass
        return self._loss.item()

    def _forward(self, m: int, tokens: torch.Tensor, targets: torch.Tensor, scale: float) -> None:
        x = tokens
        if not self.decoder.span.has_embedding:
            x = self._inputs[m] = self.link.take(Op.FORWARD, m).requires_grad_(torch.is_grad_enabled())
        output = self.decoder(x)
        if self.decoder.span.has_head:
            loss = cross_entropy_sum(output, targets)
            self._loss += loss.detach()
            output = loss * scale
        self._outputs[m] = output
        if not torch.is_grad_enabled() and m in self._inputs:
            self._release(self._inputs.pop(m))  # no backward pass will ask for it

    def _backward(self, m: int) -> None:
        output = self._outputs.pop(m)
        if self.decoder.span.has_head:
            output.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = self.link.take(Op.BACKWARD, m)
            output.backward(gradient)  # type: ignore[no-untyped-call]
            self.link.release(gradient)
        if not self.decoder.span.has_embedding:
            x = self._inputs.pop(m)
            assert x.grad is not None
            self._to_send[m] = x.grad
            self._release(x)

    def _release(self, x: torch.Tensor) -> None:
        """Give an input's memory back to the link."""
        x.grad = None
        self.link.release(x.requires_grad_(False))
