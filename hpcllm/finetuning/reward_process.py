"""Rewards of texts by a function of the user, in a process of its own that is started before MPI is.

    python -m hpcllm finetune --starts--> reward_child.py, idle          (a process that has started MPI must not fork)
      `--> MPI, training --prompts, texts, answers--> the function --numbers--> training

It has a limit of time for each call. Whatever it does wrong ends the run, with the function's file and name, the prompt
and the text in the words: it raises, ends its process, takes too long, returns what is no finite number. Pure: imports
neither torch nor mpi4py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcllm.config.schema import RewardConfig
from hpcllm.errors import ConfigError, RewardError
from hpcllm.system.text import printable

CHILD = Path(__file__).with_name("reward_child.py")
LOAD_S = 60.0  # of a file, with what it imports
END_S = 1.0  # for the process to end by itself
SHOWN_CHARACTERS = 60
# of launchers: a function that imports an MPI program would take itself for a rank
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "SLURM_", "PALS_", "FLUX_")


class Scored(NamedTuple):
    """Text to be rewarded."""

    prompt: str
    text: str
    answer: str  # of the prompt's row, without white space around it


def exact(rows: Sequence[Scored]) -> list[float]:
    """Return 1 for each text that is the answer, but for white space around it, and 0 for the others."""
    return [float(row.text.strip() == row.answer) for row in rows]


@dataclass
class RewardProcess:
    """A process that calls reward functions. What it is asked first says which."""

    process: subprocess.Popen[bytes]
    _pending: bytes = b""

    def check(self, settings: RewardConfig) -> None:
        """Load the function. Raises ConfigError if it cannot be loaded."""
        try:
            self.rewards(settings, [])
        except RewardError as error:
            raise ConfigError(
                f"{error}; valid: a Python file with a function of (prompt, text, answer) that returns a number"
            ) from error

    def rewards(self, settings: RewardConfig, rows: Sequence[Scored]) -> list[float]:
        """Call the function for each row, in order. Raises RewardError."""
        request = {"file": settings.file, "function": settings.function, "limit_s": settings.limit_s, "rows": rows}
        self._send(settings, json.dumps(request).encode() + b"\n")
        self._answer(settings, LOAD_S, None)
        return [float(self._answer(settings, settings.limit_s, row)["reward"]) for row in rows]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def _send(self, settings: RewardConfig, request: bytes) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except OSError as error:
            raise self._failed(settings, f"its process has ended: {error.strerror}", None) from error

    def _answer(self, settings: RewardConfig, limit_s: float, row: Scored | None) -> dict[str, Any]:
        """Read the next answer. row: that it is of; None: of loading the file. Raises RewardError."""
        line = self._line(limit_s)
        if line is None:
            self.process.kill()
            key = f"finetuning.reward.limit_s = {limit_s:g}" if row else f"{limit_s:g} s, the limit of loading a file"
            raise self._failed(settings, f"took longer than {key}", row)
        if not line:
            raise self._failed(settings, f"ended its process, {_ending(self.process.wait())}", row)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(settings, f"failed with {printable(answer['error'])}", row)
        return answer

    def _line(self, limit_s: float) -> bytes | None:
        """Read a line; b"" where there are no more, None where none comes in time."""
        assert self.process.stdout
        number, deadline_s = self.process.stdout.fileno(), time.monotonic() + limit_s
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while b"\n" not in self._pending:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return None
            if not (part := os.read(number, 1 << 16)):
                return b""
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failed(self, settings: RewardConfig, what: str, row: Scored | None) -> RewardError:
        function = f"finetuning.reward: {settings.function} of {settings.file!r}"
        where = f", for the prompt {_shown(row.prompt)} and the text {_shown(row.text)}" if row else ""
        return RewardError(f"{function} {what}{where}")


@contextmanager
def open_reward_process() -> Iterator[RewardProcess]:
    """Start the process, before MPI is started, and end it. Its first request decides what it loads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        [sys.executable, "-P", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the run, which finishes its step
    )
    rewards = RewardProcess(process)
    try:
        yield rewards
    finally:
        rewards.close()


def _ending(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _shown(text: str) -> str:
    return f"{printable(text[:SHOWN_CHARACTERS])!r}{'...' if len(text) > SHOWN_CHARACTERS else ''}"
