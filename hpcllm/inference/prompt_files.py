"""Prompts from a file or standard input, and completions as lines of JSON.

    prompts.jsonl   {"prompt": "The parser"}        other keys are left aside
    prompts.txt     The parser                      one a line; blank lines are left out
    -               either: JSON if the first line begins with "{"

    out             {"index": 0, "sample": 0, "prompt": "The parser", "text": " is", "tokens": 1, "reason": "length"}

A completion is written when those of all prompts before it are, or at once if order is not wanted; what has come to its
end is written too if the work is interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hpcllm.config.input_files import MIB, decoded, read_bytes
from hpcllm.config.names import shown
from hpcllm.errors import DataError
from hpcllm.inference.generate import Completion

STANDARD_INPUT = Path("-")
LARGEST_PROMPTS_BYTES = 256 * MIB
Write = Callable[[Completion], None]


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file, or of standard input for "-". Not collective. Raises DataError."""
    name = "standard input" if path == STANDARD_INPUT else shown(str(path))
    try:
        text = decoded(_standard_input() if path == STANDARD_INPUT else read_bytes(path, LARGEST_PROMPTS_BYTES))
    except (ValueError, OSError) as error:
        raise DataError(f"no prompts can be read from {name}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{name} holds no prompt; valid: one a line, or lines of JSON with a key prompt")
    is_json = path.suffix == ".jsonl" or (path == STANDARD_INPUT and lines[0][1].lstrip().startswith("{"))
    return [_prompt(line, number, name) if is_json else line.rstrip("\r") for number, line in lines]


def _standard_input() -> bytes:
    data = sys.stdin.buffer.read(LARGEST_PROMPTS_BYTES + 1)
    if len(data) > LARGEST_PROMPTS_BYTES:
        raise ValueError(f"more than {LARGEST_PROMPTS_BYTES >> 20} MiB, the most that is read of prompts")
    return data


def _prompt(line: str, number: int, name: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"line {number} of {name} is no JSON: {str(error)[:100]}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'line {number} of {name} has no prompt; valid: an object as {{"prompt": "The parser"}}')
    return prompt


@contextmanager
def completion_lines(file: IO[str], prompts: Sequence[str], samples: int, ordered: bool) -> Iterator[Write]:
    """Give a function that writes a completion to the file, in order if so wanted.

    At the end of the block, by an interruption too, what still waits for others is written.
    """
    early: dict[int, str] = {}
    due = 0

    def write(completion: Completion) -> None:
        nonlocal due
        place = completion.prompt * samples + completion.sample
        early[place] = _line(completion, prompts)
        if not ordered:
            file.write(early.pop(place))
        while due in early:
            file.write(early.pop(due))
            due += 1
        file.flush()

    try:
        yield write
    finally:
        file.writelines(early[place] for place in sorted(early))
        file.flush()


def _line(completion: Completion, prompts: Sequence[str]) -> str:
    row = {"index": completion.prompt, "sample": completion.sample, "prompt": prompts[completion.prompt]}
    row |= {"text": completion.text, "tokens": completion.tokens, "reason": completion.reason}
    return json.dumps(row, ensure_ascii=False) + "\n"
