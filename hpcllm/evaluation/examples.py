"""Examples of a task whose answers are scored, as text.

    {"context": "The sky is", "choices": ["blue", "loud"], "answer": 0}     which choice is the likeliest?
    {"context": "2 + 2 =", "answer": "4"}                                   is each token of the answer the likeliest?

A continuation is the delimiter, a space unless the example says otherwise, and the choice; example_tokens.py makes
tokens of both.

The second kind is exact match by greedy generation in one forward pass: if each token of the answer is the likeliest
one after those before it, greedy generation writes the answer, and otherwise it leaves it at the first that is not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A question with its answer. One choice: it is the answer, and is to be the likeliest text."""

    contexts: tuple[str, ...]  # one, or one a choice
    choices: tuple[str, ...]  # none is empty
    answer: int = 0  # the choice that is right
    group: str = ""  # figures are given by group, too
    delimiter: str = " "

    @property
    def is_choice(self) -> bool:
        """True if one of several choices is right."""
        return len(self.choices) > 1

    @property
    def shown(self) -> str:
        """Return the context with the right answer."""
        return "".join(self.pairs()[self.answer])

    def pairs(self) -> list[tuple[str, str]]:
        """Return context and continuation of each choice."""
        contexts = self.contexts if len(self.contexts) > 1 else self.contexts * len(self.choices)
        return [(context, self.delimiter + choice) for context, choice in zip(contexts, self.choices, strict=True)]
