"""Programs of strangers, as a model writes them, run where they can do no harm; what became of each is named.

    passed                     the program came to its end
    wrong answer               an assertion did not hold
    raised NAME                it ended with this exception: raised BlockingIOError, who wanted a second process;
                               raised FileNotFoundError or OSError, who wanted files or the network
    out of memory, out of time
    ended without a verdict    it left by itself, or a signal ended it

Each runs in a Python of its own, without network, without files but Python's and a small folder of its own, without a
second process or thread, as nobody, within limits of time, memory and files: sandbox_child.py. Where the system does
not allow that (Linux alone has it; to root, or where user namespaces are allowed) nothing is run: there is no weaker
sandbox. What is inside can lie about its own verdict, as the tests run in the program's own process; it harms nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpcllm.errors import ConfigError, HpcllmError

CHILD = Path(__file__).with_name("sandbox_child.py")
PASSED = "passed"
START_S = 20.0  # for a Python to start on a busy machine, beside the time of the program itself


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    time_s: float = 5.0
    memory_bytes: int = 512 << 20  # with Python's own, about 30 MiB
    scratch_bytes: int = 16 << 20  # of files, in memory


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program, in one of the words above, and what it said; both come from the program."""

    outcome: str
    detail: str = ""

    @property
    def has_passed(self) -> bool:
        return self.outcome == PASSED


def check_sandbox() -> None:
    """Raise ConfigError, saying what is not allowed, where programs cannot be run safely."""
    run_program("pass", Limits())


def run_all(
    programs: Sequence[str], limits: Limits, jobs: int, advance: Callable[[int], None] = lambda _: None
) -> list[Outcome]:
    """Run programs, `jobs` at a time; outcomes in their order. Raises ConfigError where nothing can be run safely."""

    def run(program: str) -> Outcome:
        found = run_program(program, limits)
        advance(1)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, programs))


def run_program(program: str, limits: Limits) -> Outcome:
    """Run one program. Raises ConfigError where nothing can be run safely, HpcllmError if the sandbox fails."""
    with tempfile.TemporaryDirectory(prefix="hpcllm sandbox ") as scratch:
        prefixes = [sys.base_prefix, os.path.realpath(sys.base_prefix)]
        settings = {"program": program, "scratch": scratch, "prefixes": prefixes, "limit_s": limits.time_s}
        settings |= {"memory_bytes": limits.memory_bytes, "scratch_bytes": limits.scratch_bytes}
        python = getattr(sys, "_base_executable", sys.executable)  # not that of an environment: it knows no packages
        try:
            done = subprocess.run(
                [python, "-I", "-S", "-B", str(CHILD)],
                input=json.dumps(settings).encode() + b"\n",
                capture_output=True,
                env={},
                cwd="/",
                timeout=limits.time_s + START_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HpcllmError(f"the sandbox did not answer: {error}") from error
    try:
        found = json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        raise ConfigError(f"programs cannot be run safely here: the sandbox ends with {said!r}") from error
    if "impossible" in found:
        raise ConfigError(
            f"programs cannot be run safely here: {found['impossible']}; valid: Linux, as root or where user "
            "namespaces are allowed (sysctl user.max_user_namespaces)"
        )
    return Outcome(found["outcome"], found["detail"])
