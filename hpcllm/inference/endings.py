"""Stop strings, which end a text before its last token: they may lie across tokens and begin inside of one.

tokens     "he" "llo\\n" "\\nQ" "uest"        stop "\\n\\nQ"
text       "hello"                         the bytes so far are searched after each token, the end of them alone
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import numpy as np

from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import ConfigError
from hpcllm.inference.batch import Batch, Text


class StopStrings:
    """Strings that end a text, of which they are no part."""

    def __init__(self, stops: Sequence[str], tokenizer: Encoder) -> None:
        """Raise ConfigError for an empty string, which would end every text."""
        if "" in stops:
            raise ConfigError("a stop string is empty; valid: one character or more")
        self.stops, self.tokenizer = stops, tokenizer
        self._longest_bytes = max((len(stop.encode()) for stop in stops), default=0)
        self._ends: dict[int, bytes] = {}  # index of a text -> its last bytes

    @property
    def longest(self) -> int:
        return max(map(len, self.stops), default=0)

    def is_over(self, text: Text) -> bool:
        """Look at the newest token of a text: return True if a stop string is complete with it (complete.IsOver)."""
        if not self.stops:
            return False
        new = self.tokenizer.decode(np.array(text.tokens[-1:]))
        end = self._ends.get(text.index, b"") + new
        self._ends[text.index] = end[-self._longest_bytes :]
        return any(stop.encode() in end for stop in self.stops)

    def cut(self, text: str) -> tuple[str, bool]:
        """Return the text up to the first stop string, and whether there is one."""
        places = [place for place in map(text.find, self.stops) if place >= 0]
        return (text[: min(places)], True) if places else (text, False)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return what tokens stand for, up to the first stop string; bytes that are no text as U+FFFD."""
        return self.cut(self.tokenizer.decode(np.array(tokens, np.int64)).decode(errors="replace"))[0]


def pieces(batch: Batch, stops: StopStrings) -> Iterator[str]:
    """Yield the text of a batch of one as it is made, a piece a token and one at the end.

    A character may take several tokens, and a stop string too: what may become one waits.
    """
    whole = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held, made, is_cut = "", 0, False
    while not batch.is_done:
        (text,) = batch.step()
        for token in text.tokens[made:]:
            held, is_cut = stops.cut(held + whole.decode(stops.tokenizer.decode(np.array([token]))))
            safe = max(len(held) - max(stops.longest - 1, 0), 0)
            yield held[:safe]
            held = held[safe:]
        made = len(text.tokens)
    yield held if is_cut else stops.cut(held + whole.decode(b"", final=True))[0]
