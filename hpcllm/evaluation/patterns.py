"""Answers found in texts by patterns, which may come from anyone: matched in a process of its own, with limits.

    this process --- pattern, text --->  pattern_child.py: CPU time of each match limited, memory limited, no files
                 <-------- match ------

A pattern that comes to a limit finds nothing in that text and in those behind it. After MOST_SLOW such patterns no more
are tried, so a file of hostile ones takes as many limits, not as many as it has rows.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpcllm.errors import HpcllmError
from hpcllm.system.text import printable

log = logging.getLogger(__name__)
CHILD = Path(__file__).with_name("pattern_child.py")
LIMIT_S = 1.0  # CPU time of one match; a usual one takes a thousandth
MOST_SLOW = 5
LONGEST_PATTERN = 1000  # characters


class Search(NamedTuple):
    """A pattern to be looked for in a text: its last match, or its first."""

    pattern: str
    text: str
    last: bool = True


def fault_of(pattern: str) -> str:
    """Return what is wrong with a pattern, "" if nothing is."""
    if len(pattern) > LONGEST_PATTERN:
        return f"it has {len(pattern):,} characters; valid: up to {LONGEST_PATTERN:,}"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is no regular expression: {error}"
    return ""


def search_all(searches: Sequence[Search]) -> list[str | None]:
    """Return what each search finds: the first group of the match that is there, else all of it; None for no match.

    Raises HpcllmError where the process of the patterns cannot be started.
    """
    if not any(search.pattern for search in searches):
        return [search.text for search in searches]
    found: list[str | None] = []
    slow: set[str] = set()
    while len(found) < len(searches):
        with _process() as process:
            found += _answers(process, searches[len(found) :], slow)
        if len(found) < len(searches) and searches[len(found)].pattern not in slow:
            pattern = searches[len(found)].pattern
            log.warning("a match of the pattern %s took more than %g s: it finds nothing", printable(pattern), LIMIT_S)
            slow.add(pattern)
    return found


def _answers(process: subprocess.Popen[str], searches: Sequence[Search], slow: set[str]) -> Iterator[str | None]:
    """Yield what searches find, up to the one that ends the process."""
    assert process.stdin
    assert process.stdout
    for search in searches:
        if search.pattern in slow or len(slow) > MOST_SLOW:
            yield None
            continue
        if not search.pattern:
            yield search.text
            continue
        try:
            process.stdin.write(json.dumps(search._asdict()) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return
        if not line:
            return
        yield json.loads(line)["found"]


@contextmanager
def _process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", "-S", "-B", str(CHILD), str(LIMIT_S)]
    pipe = subprocess.PIPE
    try:  # by vfork and exec, so the memory that MPI has registered is not copied
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        raise HpcllmError(f"no process for the patterns of a task can be started: {error}") from error
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
