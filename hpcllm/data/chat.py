"""Rows of chats -> documents with a loss mask: which characters are an assistant's, and which are control tokens.

    {"messages": [{"role", "content"}, ...]}                     every answer of an assistant counts
    {"prompt": ..., "completion": ...}                           what follows the prompt counts
    {"prompt" or "messages": ..., "chosen": ..., "rejected": ...}   two documents, one after the other; the prompt is
                                                                 what both begin with, if it is not given
A string stands for one message: a prompt of the user, an answer of the assistant.

    messages --seal--> template --> text with marks --> Rendered: text, spans of control tokens, counted spans

Counted are an assistant's content and the control token that ends its turn. Templates with {% generation %} mark them.
Of another one, answer i is what rendering messages[: i + 1] adds to rendering messages[:i] with the beginning of an
answer, up to the last control token in it; all three texts have to begin alike, else the conversation is dropped: the
template rewrites earlier turns.

Nobody's text becomes a control token: where a message holds the spelling of one, or could complete one, a noncharacter
keeps the spelling apart until the rendered text has been cut at the template's own control tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcllm.data.chat_rendering import TemplateProcess, renderer
from hpcllm.data.chat_template import BEGIN, END, SEAM, Message, RejectedError, TemplateSource
from hpcllm.data.documents import NOT_UTF8, Document, Problem, unified

Span = tuple[int, int]  # first character, one past the last
ROLES = ("system", "user", "assistant", "tool")
MOST_MESSAGES = 1000
LARGEST_ROW_BYTES = 16 * 2**20  # of JSON, whose objects take up to thirty times as much while they are looked at
TOO_LARGE = f"chat larger than {LARGEST_ROW_BYTES // 2**20} MiB"
NO_CHAT = "row without messages, prompt and completion, or chosen and rejected"
NO_LIST = "messages neither a list nor a string"
NO_MESSAGE = "message without role and content as strings"
NO_ROLE = f"role other than {', '.join(ROLES)}"
TOOL_CALLS = "tool calls outside the content of a message"
TOO_MANY = f"more than {MOST_MESSAGES:,} messages"
RESERVED = "noncharacter of Unicode (U+FDD0 to U+FDD2)"
NO_ANSWER = "no answer of an assistant that counts"
REWRITTEN = "turns that the chat template rewrites when others follow"
EQUAL = "chosen and rejected are equal"
BAD_MARKS = "generation blocks of the chat template inside one another"
Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True)
class Rendered:
    """One conversation as text, with the spans that are control tokens, and those that count as targets; both rise."""

    text: str
    controls: tuple[Span, ...]
    counted: tuple[Span, ...]

    def pieces(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (first, end, is a control token), gapless, no piece empty."""
        place = 0
        for first, end in self.controls:
            if first > place:
                yield place, first, False
            yield first, end, True
            place = end
        if place < len(self.text):
            yield place, len(self.text), False


@dataclass(frozen=True)
class ChatDocument(Document):
    """A row: one conversation, or the chosen and the rejected one. `text` is what its tokens stand for."""

    rendered: tuple[Rendered, ...] = ()

    @property
    def kind(self) -> str:
        return "chat" if len(self.rendered) == 1 else "preferences"

    @property
    def identity(self) -> str:
        return repr(self.rendered)


class ChatTemplate:
    """A way to render messages and the control tokens of its tokenizer: spelling -> special, so of no text."""

    def __init__(self, render: Render, controls: Mapping[str, bool], has_marks: bool) -> None:
        self._render, self._has_marks = render, has_marks
        self._controls = {token: special for token, special in controls.items() if len(token) > 1}
        either = "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))) or "(?!)"
        self._spelled = re.compile(f"(?=(?:{either}))(.)", re.DOTALL)
        self._mark = re.compile(f"{either}|[{BEGIN}{END}{SEAM}]")
        self._heads = tuple({token[:n] for token in self._controls for n in range(1, len(token))})
        self._tails = tuple({token[n:] for token in self._controls for n in range(1, len(token))})

    def apply(self, messages: Sequence[Message], prompt: int) -> Rendered:
        """Render messages, the first `prompt` of which never count. Raises RejectedError."""
        sealed = self._sealed(messages)
        raw = self._render(sealed, False)
        whole = self._cut(raw)
        counted = whole.counted if self._has_marks else tuple(self._added(sealed, raw, whole, prompt))
        if prompt:
            begin = self._end_of(sealed[:prompt], True, raw, whole)
            counted = tuple((max(first, begin), end) for first, end in counted if end > begin)
        if not counted:
            raise RejectedError(NO_ANSWER)
        return Rendered(whole.text, whole.controls, counted)

    def beginning(self, prompt: str) -> Rendered:
        """Render what a user says, and the beginning of the answer to it. Raises RejectedError."""
        return self._cut(self._render(self._sealed(_messages(prompt, "user")), True))

    def ends_of_turn(self) -> frozenset[str]:
        """Find the control tokens that end an answer; none if the template rejects the shortest conversation."""
        try:
            chat = self.apply([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], 0)
        except RejectedError:
            return frozenset()
        counted = [(a, b) for a, b in chat.controls if any(first <= a and b <= end for first, end in chat.counted)]
        return frozenset(chat.text[a:b] for a, b in counted)

    def plain(self, chat: Rendered) -> str:
        """Return the text that tokens stand for: all but special tokens."""
        text = chat.text
        return "".join(text[a:b] for a, b, control in chat.pieces() if not control or not self._controls[text[a:b]])

    def _sealed(self, messages: Sequence[Message]) -> list[Message]:
        return [{"role": each["role"], "content": self._seal(each["content"])} for each in messages]

    def _seal(self, content: str) -> str:
        """Keep the spelling of control tokens apart, inside the text and where it could meet the template's."""
        inside = self._spelled.sub(rf"\1{SEAM}", content)
        before = SEAM if content.startswith(self._tails) else ""
        return before + inside + (SEAM if content.endswith(self._heads) else "")

    def _cut(self, text: str) -> Rendered:
        """Find control tokens and marks, the longest first as tokenizers do, and take the marks out."""
        parts: list[str] = []
        controls: list[Span] = []
        counted: list[Span] = []
        length, place, begin = 0, 0, -1
        for found in self._mark.finditer(text):
            parts.append(text[place : found.start()])
            length, place = length + len(parts[-1]), found.end()
            if found[0] in (BEGIN, END):
                if (found[0] == BEGIN) != (begin < 0):
                    raise RejectedError(BAD_MARKS)
                if found[0] == END and length > begin:
                    counted.append((begin, length))
                begin = length if found[0] == BEGIN else -1
            elif found[0] != SEAM:
                parts.append(found[0])
                controls.append((length, length + len(found[0])))
                length += len(found[0])
        return Rendered("".join([*parts, text[place:]]), tuple(controls), tuple(counted))

    def _added(self, messages: Sequence[Message], raw: str, whole: Rendered, prompt: int) -> Iterator[Span]:
        """Yield what each answer adds to the text in front of it."""
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i >= prompt:
                first = self._end_of(messages[:i], True, raw, whole)
                end = self._end_of(messages[: i + 1], False, raw, whole)
                last = max((stop for start, stop in whole.controls if first <= start and stop <= end), default=end)
                if last > first:
                    yield first, last

    def _end_of(self, messages: Sequence[Message], prompts: bool, raw: str, whole: Rendered) -> int:
        """Return where the text of the first messages ends in `whole`, which is `raw` without marks."""
        text = self._render(messages, prompts)
        if raw.startswith(text):  # nearly always; what a cut takes out is single characters
            return len(text) - sum(map(text.count, (BEGIN, END, SEAM)))
        text = self._cut(text).text
        if not whole.text.startswith(text):
            raise RejectedError(REWRITTEN)
        return len(text)


@contextmanager
def open_template(source: TemplateSource, controls: Mapping[str, bool]) -> Iterator[ChatTemplate]:
    """Yield the template; one that is not ours runs in a process of its own. Raises DataError.

    controls: the control tokens of the tokenizer, as of controls_of.
    """
    if source.is_ours:
        yield ChatTemplate(renderer(source), controls, source.has_marks)
        return
    with TemplateProcess(source) as process:
        yield ChatTemplate(process, controls, source.has_marks)


@dataclass(frozen=True)
class ChatRows:
    """Reader of rows of chats, for read_documents."""

    template: ChatTemplate
    columns: tuple[str, ...] = ("messages", "prompt", "completion", "chosen", "rejected")
    largest_bytes: int = LARGEST_ROW_BYTES
    too_large: str = TOO_LARGE

    def read(self, origin: str, row: Mapping[str, Any], largest_bytes: int) -> Document | Problem:
        """Render a row. Never raises for what it holds; DataError for a template that does not end."""
        try:
            prompt, answers = _conversations(row)
            if sum(len(each["content"]) for part in (prompt, *answers) for each in part) > largest_bytes:
                raise RejectedError(TOO_LARGE)
            chats = tuple(self.template.apply([*prompt, *answer], len(prompt)) for answer in answers)
            if len(chats) == 2 and chats[0] == chats[1]:
                raise RejectedError(EQUAL)
        except RejectedError as error:
            return Problem(f"{origin} ({error.detail})" if error.detail else origin, error.reason)
        return ChatDocument(origin, "".join(map(self.template.plain, chats)), chats)


def _conversations(row: Mapping[str, Any]) -> tuple[list[Message], list[list[Message]]]:
    """Return the messages that never count, and one or two continuations. Raises RejectedError."""
    has = {key for key, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        chosen, rejected = (_messages(row[key], "assistant") for key in ("chosen", "rejected"))
        if given := has & {"prompt", "messages"}:
            return _messages(row[max(given)], "user"), [chosen, rejected]
        shared = _shared(chosen, rejected)
        return chosen[:shared], [chosen[shared:], rejected[shared:]]
    if "messages" in has:
        return [], [_messages(row["messages"], "user")]
    if {"prompt", "completion"} <= has:
        return _messages(row["prompt"], "user"), [_messages(row["completion"], "assistant")]
    raise RejectedError(NO_CHAT)


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count the messages that both begin with; of the last of the shorter one an answer is left."""
    pairs = list(zip(one[:-1], other[:-1], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _messages(value: Any, role: str) -> list[Message]:
    """Check messages. role: of a string, which stands for one. Raises RejectedError."""
    if isinstance(value, str):
        return [{"role": role, "content": _content(value)}]
    if not isinstance(value, list):
        raise RejectedError(NO_LIST)
    if len(value) > MOST_MESSAGES:
        raise RejectedError(TOO_MANY)
    return [_message(each) for each in value]


def _message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if isinstance(value, dict) and value.get("tool_calls"):
        raise RejectedError(TOOL_CALLS)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RejectedError(NO_MESSAGE)
    if role not in ROLES:
        raise RejectedError(NO_ROLE)
    return {"role": role, "content": _content(content)}


def _content(text: str) -> str:
    """Bring a message into normal form; white space at its end stays."""
    if any(mark in text for mark in (BEGIN, END, SEAM)):
        raise RejectedError(RESERVED)
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RejectedError(NOT_UTF8) from error
    return unicodedata.normalize("NFC", unified(text))
