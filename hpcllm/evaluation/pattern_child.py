"""Patterns of strangers, matched: the script that patterns.py starts, in a Python of its own that has imported no more.

    {"pattern": ..., "text": ..., "last": true} a line --> {"found": ...} a line; at a limit the process ends without

A regular expression can take longer than the universe has been there, so each match has a limit of CPU time.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

MEMORY_BYTES = 1 << 30


def main() -> int:
    """Answer the lines of standard input; the first argument is the limit of each in seconds of CPU time."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    limit_s = float(sys.argv[1])
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process
        found = match(asked["pattern"], asked["text"], asked["last"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"found": found}), flush=True)
    return 0


def match(pattern: str, text: str, last: bool) -> str | None:
    """Return the last or the first match, of one with groups the first group that is there; None for no match."""
    found = None
    for found in re.finditer(pattern, text):  # noqa: B007 - the last one is wanted
        if not last:
            break
    if found is None:
        return None
    return next((group for group in found.groups() if group is not None), found[0])


if __name__ == "__main__":
    sys.exit(main())
