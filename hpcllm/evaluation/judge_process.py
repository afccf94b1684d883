"""Programs of a model, judged beside a job of MPI: a process that is started before MPI, for none may fork after it.

    rank      starts it --> MPI_Init --> weights, texts --> programs ---> threads, each with a sandbox at a time
              <-------------------------- what became of each <---------  (sandbox.py)

Each rank has one, and judges its share. It ends when its rank does, for then nobody writes to it any more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import IO, Any

from hpcllm import errors
from hpcllm.errors import HpcllmError
from hpcllm.evaluation.sandbox import Limits, Outcome, run_program

CODE = "humaneval"  # the task that runs programs


@contextmanager
def open_judge(tasks: Sequence[str]) -> Iterator[JudgeProcess | None]:
    """Start the process of this rank if one of the tasks, as they are named, runs programs; else None."""
    if not any(text.partition("=")[0] == CODE for text in tasks):
        yield None
        return
    with JudgeProcess() as process:
        yield process


class JudgeProcess:
    """Process that runs programs in sandboxes. Use with `with`, before MPI is started."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "hpcllm.evaluation.judge_process"]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise HpcllmError(f"the process that runs programs cannot be started: {error}") from error

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def check(self) -> None:
        """Raise ConfigError, saying what is not allowed, where programs cannot be run safely."""
        self.run(["pass"], Limits(), 1)

    def run(self, programs: Sequence[str], limits: Limits, jobs: int) -> list[Outcome]:
        """Run programs, `jobs` at a time; outcomes in their order. Not collective.

        Raises ConfigError where nothing can be run safely, HpcllmError if the sandbox or the process fails.
        """
        asked, answered = self._process.stdin, self._process.stdout
        assert asked
        assert answered
        try:
            asked.write(
                json.dumps({"programs": list(programs), "limits": asdict(limits), "jobs": jobs}).encode() + b"\n"
            )
            asked.flush()
            line = answered.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise HpcllmError("the process that runs programs has ended")
        answer = json.loads(line)
        if "fault" in answer:
            kind: type[HpcllmError] = getattr(errors, answer["kind"])
            raise kind(answer["fault"])
        return [Outcome(*each) for each in answer["outcomes"]]


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer the questions of JudgeProcess."""
    for line in questions:
        answers.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
        answers.flush()


def _answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    run = partial(run_program, limits=Limits(**asked["limits"]))
    try:
        with ThreadPoolExecutor(asked["jobs"]) as pool:
            return {"outcomes": [[found.outcome, found.detail] for found in pool.map(run, asked["programs"])]}
    except HpcllmError as error:
        return {"kind": type(error).__name__, "fault": str(error)}


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
