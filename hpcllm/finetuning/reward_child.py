"""Process that calls a reward function: the script that reward_process.py starts, in a Python of its own.

    standard input    {"file", "function", "limit_s", "rows": [[prompt, text, answer], ...]}
    standard output   {"loaded": true}, {"reward": 0.5} a row          each a line; of what fails {"error": "words"}

The function is the user's own program, with the user's rights. What it prints goes to standard error. It imports
nothing of hpcllm, so that the function may import what it likes; files beside that of the function are found, too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

LONGEST_WORDS = 500
LOAD_S = 60.0  # of a file, with what it imports; as in reward_process.py
GRACE_S = 10.0  # beyond the limit of a call: whoever asked has seen to it by then, unless that process is gone


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    functions: dict[tuple[str, str], Callable[..., Any]] = {}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        key = request["file"], request["function"]
        for answer in answers_to(request, functions, key):
            print(json.dumps(answer), file=answers, flush=True)


def answers_to(request: Any, functions: dict[tuple[str, str], Callable[..., Any]], key: tuple[str, str]) -> Any:
    """Yield the answers to a request, of which an error is the last."""
    try:
        end_after(LOAD_S + GRACE_S)
        if key not in functions:
            functions[key] = load(*key)
        yield {"loaded": True}
        for row in request["rows"]:
            end_after(request["limit_s"] + GRACE_S)
            yield {"reward": number(functions[key](*row))}
    except BaseException as error:  # of the user's program: SystemExit too
        yield {"error": words(error, key[0])}
    end_after(0)


def end_after(limit_s: float) -> None:
    """Let the system end this process so many seconds from now, whatever runs; 0: no more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)


def load(path: str, name: str) -> Callable[..., Any]:
    """Run a file and return its function of this name."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    specification = importlib.util.spec_from_file_location("reward_file", path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path!r} is no Python file; valid: a name that ends with .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise NameError(f"there is no function {name!r}; valid: {', '.join(known[:8]) or 'none of this file'}")
    return function  # type: ignore[no-any-return]


def number(value: Any) -> float:
    """Return a reward as a float. Raises TypeError, ValueError."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"it returned {value!r:.80}, a {type(value).__name__}; valid: a number")
    if not math.isfinite(value):
        raise ValueError(f"it returned {float(value)}; valid: a finite number")
    return float(value)


def words(error: BaseException, path: str) -> str:
    """Say what went wrong, and on which line of the file, if on one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}"[:LONGEST_WORDS] + where


if __name__ == "__main__":
    main()
