"""Gradients of which a rank keeps its share only; what a microbatch adds passes through (ZeRO-2, arXiv:1910.02054).

    backward pass     w3 ----> w2 ----> w1                microbatch 1: w3 ----> w2 ----> ...
                       |        |
    a free buffer    [ w3     w2 ]--reduce-scatter--> + own stretch of the float32 sum
                                                 `--> the buffer is free again

A buffer is taken when a first gradient of a section comes, and sent off as soon as each of its parameters has brought
something; what came twice meanwhile is added up, and what is left at the end of a step is sent then. Sums are linear,
so it does not matter which microbatch travels when, as long as all replicas send at the same points of the program:
they run the same schedule, and autograd goes through equal graphs in equal order. Sums over tp and over the ends of the
pipeline come last, of the share alone: other stages are at other points, and to wait for one of them could be for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from hpcllm.collectives.worker import Worker
from hpcllm.optim.buckets import squares, taken_gradient
from hpcllm.optim.sections import Section
from hpcllm.optim.summation import EXACTLY, Moment

MOST_LEAVING = 2  # buffers on their way; more would take memory, and time only if the wire is the slower one anyway


@dataclass
class Passage:
    """One section's way out."""

    section: Section
    share: Tensor  # (owned,) float32
    buffer: Tensor | None = None  # at least (flat.size,) float32, while something is in it
    came: dict[str, int] = field(default_factory=dict)  # how many times each parameter added to the buffer
    parts: int = 0  # buffers sent off in this step
    additions: int = 0  # in this step


@dataclass
class PassingGradients:
    """See buckets.Gradients."""

    passages: list[Passage]
    worker: Worker
    _moment: Moment = EXACTLY
    _home: dict[Tensor, tuple[Passage, str, slice]] = field(default_factory=dict)  # by parameter: name, its place
    _scratch: Tensor = field(default_factory=lambda: torch.empty(0))  # (longest share,) float32, the worker's
    _free: list[Tensor] = field(default_factory=list)
    _leaving: deque[tuple[Tensor, Future[None]]] = field(default_factory=deque)

    @property
    def shares(self) -> list[Tensor]:
        return [passage.share for passage in self.passages]

    def begin(self, step: int, exact: bool) -> None:
        self._moment = Moment(step, exact)
        torch._foreach_zero_(self.shares)
        for passage in self.passages:
            passage.parts = passage.additions = 0

    def added(self, parameter: Tensor) -> None:
        """Move it to the section's buffer; submit that once every parameter has brought something."""
        passage, name, place = self._home[parameter]
        if passage.buffer is None:
            passage.buffer = self._take(passage.section.flat.size)
        view, gradient = passage.buffer[place], taken_gradient(parameter).view(-1)
        if name in passage.came:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        passage.came[name] = passage.came.get(name, 0) + 1
        passage.additions += 1
        if len(passage.came) == len(passage.section.flat.names):
            self._send(passage)

    def finish(self) -> None:
        for passage in self.passages:
            assert passage.additions == passage.section.additions, "a parameter got more or fewer gradients than said"
            if passage.buffer is not None:
                self._send(passage)
        for passage in self.passages:
            if passage.section.summation.others:
                self.worker.submit(partial(passage.section.summation.over_others, passage.share, self._moment))
        self.worker.finish()
        self._free += [buffer for buffer, _ in self._leaving]
        self._leaving.clear()

    def squared_norm(self) -> Tensor:
        return squares([passage.share for passage in self.passages if passage.section.counts], self._scratch)

    def is_finite(self) -> bool:
        return math.isfinite(squares(self.shares, self._scratch))

    def hook_up(self, passage: Passage, parameters: Mapping[str, nn.Parameter]) -> None:
        flat, start = passage.section.flat, 0
        for name, size in zip(flat.names, flat.sizes, strict=True):
            self._home[parameters[name]] = passage, name, slice(start, start + size)
            parameters[name].register_post_accumulate_grad_hook(self.added)  # type: ignore[no-untyped-call]
            start += size

    def _take(self, n: int) -> Tensor:
        """A buffer of n values at least; memory is only asked for while the pool grows."""
        while self._leaving and (len(self._leaving) > MOST_LEAVING or self._leaving[0][1].done()):
            buffer, future = self._leaving.popleft()
            self.worker.wait(future)
            self._free.append(buffer)
        fitting = [place for place, buffer in enumerate(self._free) if buffer.numel() >= n]
        if not fitting:
            return self._scratch.new_empty(n)
        return self._free.pop(min(fitting, key=lambda place: self._free[place].numel()))

    def _send(self, passage: Passage) -> None:
        """Submit what is in the section's buffer."""
        assert passage.buffer is not None
        flat = passage.section.flat
        values = passage.buffer[: flat.size]
        for name, view in zip(flat.names, passage.section.views(values), strict=True):
            if name not in passage.came:
                view.zero_()
        moment = Moment(self._moment.step, self._moment.exact, passage.parts)
        future = self.worker.submit(partial(self._sum, passage, values, moment))
        self._leaving.append((passage.buffer, future))
        passage.parts += 1
        passage.buffer = None
        passage.came.clear()

    def _sum(self, passage: Passage, values: Tensor, moment: Moment) -> None:
        total = self._scratch[: passage.section.owned]
        passage.section.summation.shared_out(values, total, moment)
        passage.share.add_(total)


def make_passages(
    sections: Sequence[Section], parameters: Mapping[str, nn.Parameter], worker: Worker
) -> PassingGradients:
    """A passage for each section, hooked up."""
    like = next(iter(parameters.values())).new_empty(0, dtype=torch.float32)
    result = PassingGradients([Passage(section, like.new_zeros(section.owned)) for section in sections], worker)
    result._scratch = like.new_empty(max((section.owned for section in sections), default=0))
    for passage in result.passages:
        result.hook_up(passage, parameters)
    return result
