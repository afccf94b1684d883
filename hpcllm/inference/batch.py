"""Many texts at once, token by token: one that ends makes room for the next one in the same moment.

    pass   1        2        3        4        5        6
    a      prompt   t        t        t        end
    b      prompt   t        end
    c      (waits)           .        prompt   t        t         reads its prompt when b has given its blocks back
                                                                  (a and b stand still for that pass)

A text begins when a place in the batch and blocks for its prompt are free, and takes blocks as it grows. If there are
none, the youngest text gives all of its own back and waits: it is read again, prompt and what it has, and goes on as it
would have, for a token depends on the text before it and on its own seed alone. The longest text fits alone, so there
is always one that goes on. When a text has max_sequence tokens, the last half of them is read afresh: it goes on from
there, and a token's cost stays the same.

    max_sequence 8    read   a b c d e f g h | f g h i | j | k | l | m | k l m n | o | ...    i, n: the blocks were full
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpcllm.model.paged_cache import BlockPool
from hpcllm.model.sampling import uniform

PASS_TOKENS = 2048  # of prompts that are read at once; a longer one is read alone


@dataclass(frozen=True)
class Request:
    """A prompt as tokens, one at least, and the seed of what follows it (sampling.seed_of)."""

    prompt: Sequence[int]
    seed: int


@dataclass(eq=False)
class Text:
    """A request, and what has been made for it so far."""

    index: int  # of the request among all
    request: Request
    tokens: list[int] = field(default_factory=list)  # new ones, without the one that ends it
    reason: str = ""  # why it ended: "stop" or "length"; "": it has not
    blocks: list[int] = field(default_factory=list)
    first: int = 0  # of the tokens, prompt included, that it goes on from
    read: int = 0  # how many of those the cache has

    def after(self, start: int) -> list[int]:
        """Return the tokens from a place on, prompt included."""
        prompt = self.request.prompt
        return [*prompt[start:], *self.tokens] if start < len(prompt) else self.tokens[start - len(prompt) :]

    @property
    def unread(self) -> list[int]:
        """Return the tokens that the next pass reads for this text."""
        return self.after(self.first + self.read)


class NextTokens(Protocol):
    """One pass of a model, on all ranks that share it."""

    def next_tokens(self, texts: Sequence[Text], uniforms: Sequence[float]) -> list[int]:
        """Read what is unread of each text, whose blocks hold it, and draw a token for each."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a batch: the same on all ranks that share a model."""

    tokens: int  # new ones, of each text
    texts: int  # at once
    window: int  # max_sequence of the model
    stops: Collection[int] = ()  # tokens that end a text


class Batch:
    """Texts that are made at once and texts that wait. Ranks that share a model have equal batches."""

    def __init__(
        self,
        model: NextTokens,
        texts: Iterable[Text],
        limits: Limits,
        pool: BlockPool,
        is_over: Callable[[Text], bool] = lambda _: False,
    ) -> None:
        """texts: new ones; they begin in this order. is_over: called after each new token; True ends the text there."""
        self.model, self.limits, self.pool, self.is_over = model, limits, pool, is_over
        self._waiting = deque(texts)
        self._active: list[Text] = []  # in the order in which they began
        for text in self._waiting:
            text.first = max(len(text.request.prompt) - limits.window, 0)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._active

    def step(self) -> list[Text]:
        """Run one pass: for new texts if there is room, else for all that go on. Returns those that got a token.

        A text that came to its end is among them; with nothing to make, those that never begin. Collective over the
        ranks that share the model. Raises NonFiniteError.
        """
        if self.limits.tokens == 0:
            ended, self._waiting = list(self._waiting), deque()
            for text in ended:
                text.reason = "length"
            return ended
        chosen = self._begin() or self._go_on()
        uniforms = [uniform(text.request.seed, len(text.tokens)) for text in chosen]
        for text, token in zip(chosen, self.model.next_tokens(chosen, uniforms), strict=True):
            text.read += len(text.unread)
            self._take(text, token)
        self._active = [text for text in self._active if not text.reason]
        return chosen

    def _begin(self) -> list[Text]:
        """Let waiting texts begin for which there is room, in order, and return them.

        Room is left for a block more of each text, else the youngest one would soon have to go.
        """
        begun: list[Text] = []
        unread = 0
        while self._waiting and len(self._active) < self.limits.texts:
            text = self._waiting[0]
            count = len(text.unread)
            if (begun and unread + count > PASS_TOKENS) or not self.pool.grow(text.blocks, count, len(self._active)):
                break
            begun.append(self._waiting.popleft())
            self._active.append(text)
            unread += count
        return begun

    def _go_on(self) -> list[Text]:
        """Give each active text room for its unread tokens, at the cost of the youngest ones, and return them."""
        for text in list(self._active):
            while text in self._active and not self.pool.grow(text.blocks, text.read + len(text.unread)):
                youngest = self._active.pop()
                self._release(youngest)
                self._waiting.appendleft(youngest)
        return list(self._active)

    def _take(self, text: Text, token: int) -> None:
        """Add a token to its text, and end the text if that is due."""
        if token in self.limits.stops:
            text.reason = "stop"
        else:
            text.tokens.append(token)
            if self.is_over(text):
                text.reason = "stop"
            elif len(text.tokens) == self.limits.tokens:
                text.reason = "length"
        if text.reason:
            self._release(text)
        elif text.read == self.limits.window:
            self._release(text)
            text.first += self.limits.window + 1 - max(self.limits.window // 2, 1)

    def _release(self, text: Text) -> None:
        self.pool.give_back(text.blocks)
        text.read = 0


def in_order(texts: Iterator[Text]) -> Iterator[Text]:
    """Yield texts in the order of their requests, each as soon as those before it have come."""
    early: dict[int, Text] = {}
    due = 0
    for text in texts:
        early[text.index] = text
        while due in early:
            yield early.pop(due)
            due += 1
