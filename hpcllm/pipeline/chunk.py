"""One virtual stage: the forward pass of a microbatch, then its backward pass, whole or in two halves.

    F3   x ---> decoder ---> output          kept until the backward pass: x, and where the graph of output begins
    B3   x gradient <------- gradient        everything kept is freed
    I3   x gradient <------- gradient        the graph is freed; what the weight gradients need stays
    W3   weight gradients                    and is freed here

Of an output only its place in the graph is kept, so its memory is free once it was sent. On the last virtual stage the
output is the loss: the first of the sums that a criterion makes of the nats of the targets (model/loss.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpcllm.model.documents import Documents
from hpcllm.model.linear import DeferredGradients
from hpcllm.model.loss import Criterion, Total
from hpcllm.model.transformer import Decoder
from hpcllm.pipeline.actions import Action, Op
from hpcllm.pipeline.host_activations import HostActivations, SavedPass

TOTAL = Total()


@dataclass
class _Kept:
    """State kept of one forward pass until its backward pass."""

    x: torch.Tensor
    output: GradientEdge
    deferred: DeferredGradients | None  # None: the backward pass is whole
    saved: SavedPass | None  # what waits in host memory


@dataclass
class Chunk:
    """A rank's piece of the model, and the state of the microbatches that are on their way through it.

    Where tp splits the sequence between the layers, hidden states are (size, sequence/tp, hidden).
    """

    decoder: Decoder
    host: HostActivations | None = None  # where what autograd keeps waits, if not on the device
    sums: torch.Tensor = field(init=False)  # (size of the criterion,) float64 on the decoder's device
    _passes: dict[int, _Kept] = field(default_factory=dict)  # by microbatch, from F to B or I
    _halves: dict[int, DeferredGradients] = field(default_factory=dict)  # from I to W

    def __post_init__(self) -> None:
        self.begin(1)

    def begin(self, sums: int) -> None:
        """Set so many sums to 0."""
        self.sums = torch.zeros(sums, dtype=torch.float64, device=self.decoder.device)

    @property
    def live(self) -> int:
        """Number of microbatches of which something is kept."""
        return len(self._passes) + len(self._halves)

    def forward(
        self,
        m: int,
        x: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        split: bool,
        documents: Documents | None = None,
        criterion: Criterion = TOTAL,
    ) -> torch.Tensor:
        """Return hidden states (size, sequence, hidden), or `scale` times the summed loss where the chunk has the head.

        x: tokens (size, sequence) int64 where it has the embedding, else hidden states, which must not change before
        the backward pass. split: that pass will come in two halves. Nothing is kept while gradients are off.
        """
        if not self.decoder.span.has_embedding:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        deferred = DeferredGradients() if split else None
        with self.host.keeping(x) if self.host and torch.is_grad_enabled() else nullcontext() as saved:
            output = self.decoder.hidden_states(x, deferred, documents=documents)
            if self.decoder.span.has_head:
                sums = criterion(self.decoder.nats(output, targets, deferred))
                if self.decoder.tp.rank == 0:  # all tp ranks have the same
                    self.sums += sums.detach()
                output = sums[0] * scale
        if torch.is_grad_enabled():
            self._passes[m] = _Kept(x, get_gradient_edge(output), deferred, saved)
        detached: torch.Tensor = output.detach()
        return detached

    def backward(self, m: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of x, None of tokens. The other gradients are added to .grad, or wait for `weights`.

        gradient: of the output; None where that is the loss.
        """
        kept = self._passes.pop(m)
        with torch.autograd.set_multithreading_enabled(False):  # else hooks call MPI from a thread of the device's
            torch.autograd.backward(kept.output, gradient)
        if kept.saved is not None:
            kept.saved.done()
        if kept.deferred is not None:
            self._halves[m] = kept.deferred
        return kept.x.grad

    def weights(self, m: int, added: Callable[[torch.Tensor], None]) -> None:
        """Run the second half of a backward pass in two; added: called with each parameter whose .grad was added to."""
        self._halves.pop(m).add(added)


def additions(decoders: Sequence[Decoder], actions: Iterable[Action]) -> Counter[str]:
    """Count how many times these actions add to the gradient of each parameter that is trained.

    decoders: of each chunk of the rank. A backward pass adds once to each, at B, or at I or W; twice to an embedding
    that is also the head of the same chunk: what comes through the head, and what comes through the input.
    """
    work = Counter((action.op, action.chunk) for action in actions)
    counts: Counter[str] = Counter()
    for chunk, decoder in enumerate(decoders):
        passes = work[Op.BACKWARD, chunk] + work[Op.BACKWARD_INPUT, chunk]
        trained = {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
        counts.update(dict.fromkeys(trained, passes))
        is_both = decoder.model.tied and decoder.span.has_embedding and decoder.span.has_head
        if is_both and "embedding.weight" in trained:
            counts["embedding.weight"] += passes
    return counts
