"""Rendering of chats by templates: ours in this process, a tokenizer's own in a sandbox inside a process with limits.

A tokenizer's template may come from anyone, so it is a program that we do not trust. Jinja's immutable sandbox keeps it
from our objects; a process of its own keeps what a sandbox cannot: time, memory, files.

    rank ---- {"messages": [...], "add_generation_prompt": ...} a line ----> process: CPU time of each answer limited,
         <--- {"text": ...} or {"fault": ...} a line -----------------------          memory limited, no files written

A conversation that a template rejects is dropped and counted. A template that hits a limit ends `prepare`.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcllm.data.chat_template import BEGIN, END, INSTEAD, Message, RejectedError, TemplateSource
from hpcllm.errors import DataError
from hpcllm.system.text import printable

LARGEST_TEXT_CHARACTERS = 2**24  # of a rendered conversation
TIME_S = 2  # CPU time of one answer; a usual one takes a thousandth
MEMORY_BYTES = 2**30
TEMPLATE_REJECTS = "conversation that the chat template rejects"


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks, in the text, of what an assistant has written."""

    tags = {"generation"}  # noqa: RUF012 (as in Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
        return [begin, *body, end]


def compiled(text: str) -> Template:
    """Compile a template as transformers does: trimmed blocks, break and continue, {% generation %}."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], keep_trailing_newline=False
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(text)


def rendered(template: Template, messages: Sequence[Message], prompts: bool, variables: Mapping[str, str]) -> str:
    """Render messages; prompts: with the beginning of the answer that is to come. Raises RejectedError.

    No clock is offered (transformers' strftime_now): a store depends on its input alone.
    """
    parts, length = [], 0
    try:
        for part in template.generate(messages=messages, add_generation_prompt=prompts, tools=None, **variables):
            parts.append(part)
            if (length := length + len(part)) > LARGEST_TEXT_CHARACTERS:
                raise RejectedError(TEMPLATE_REJECTS, f"its text is longer than {LARGEST_TEXT_CHARACTERS:,} characters")
    except RejectedError:
        raise
    except Exception as error:  # a template is a program: it may fail in any way
        raise RejectedError(TEMPLATE_REJECTS, printable(f"{type(error).__name__}: {error}"[:100])) from error
    return "".join(parts)


def renderer(source: TemplateSource) -> Callable[[Sequence[Message], bool], str]:
    """Make the function that renders by one of our own templates, in this process."""
    template = compiled(source.text)
    return lambda messages, prompts: rendered(template, messages, prompts, source.variables or {})


class TemplateProcess:
    """A template that may come from anyone, rendered by a process of this rank. Use with `with`.

    Started by vfork and exec, so the memory that MPI has registered is not copied. Raises DataError for a template that
    does not compile.
    """

    def __init__(self, source: TemplateSource) -> None:
        command = [sys.executable, "-m", "hpcllm.data.chat_rendering"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        try:
            answer = self._ask({"template": source.text, "variables": dict(source.variables or {})})
            if fault := answer.get("fault"):
                raise DataError(f"the tokenizer's chat template cannot be used: {fault}; {INSTEAD}")
        except DataError:
            self.close()
            raise

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __call__(self, messages: Sequence[Message], prompts: bool) -> str:
        """Render messages. Raises RejectedError; DataError if the template has hit a limit."""
        answer = self._ask({"messages": list(messages), "prompts": prompts})
        if fault := answer.get("fault"):
            raise RejectedError(TEMPLATE_REJECTS, str(fault))
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        asked, answered = self._process.stdin, self._process.stdout
        assert asked
        assert answered
        try:
            asked.write(json.dumps(question).encode() + b"\n")
            asked.flush()
            line = answered.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise DataError(
                f"the tokenizer's chat template does not end: one conversation took more than {TIME_S} s of CPU time "
                f"or {MEMORY_BYTES >> 20} MiB; {INSTEAD}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _raise(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer the questions of TemplateProcess, the first of which is the template, under limits of this process."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    template, variables = None, {}
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, TIME_S)  # its signal ends the process, inside the interpreter's C code too
        question = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if template is None:
                template, variables = compiled(question["template"]), question["variables"]
            else:
                answer["text"] = rendered(template, question["messages"], question["prompts"], variables)
        except RejectedError as error:
            answer["fault"] = error.detail
        except Exception as error:  # of the compiler: too deep, too large, no Jinja
            answer["fault"] = printable(f"{type(error).__name__}: {error}"[:200])
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
