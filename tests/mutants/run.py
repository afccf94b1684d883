#!/usr/bin/env python3
"""Run deliberate faults against the tests: each fault of mutants.toml has to make the tests beside it fail.

    python tests/mutants/run.py                         all faults, one after another, in this working tree
    python tests/mutants/run.py --only NAME,...         these, by name or by room
    python tests/mutants/run.py --verify                first run each selection of tests without any fault
    python tests/mutants/run.py --jobs 2                two at a time, each in a work tree of its own

    killed      the tests failed, or were ended by pytest because they hung
    SURVIVED    the tests passed: nobody would notice the fault
    STALE       the text to replace is not in its file exactly once: the code has moved, the entry has to follow
    BROKEN      the tests are not there, did not come to an end, or fail (with --verify) without the fault as well

Exit code: 0 all killed, 1 otherwise, 2 for a mistake on the command line.

An entry of mutants.toml:

    [[mutant]]
    name = "ring_sends_wrong_chunk"
    room = "collectives"
    file = "hpcllm/collectives/ring.py"    # from the root of the repository
    find = '''chunk = rank - 1'''          # exactly once in the file; lines with their indentation
    replace = '''chunk = rank'''
    group = "3"                            # serial, a number of ranks, sealed:2, open:2, ...: as HPCLLM_TESTS of run.sh
    tests = ["tests/collectives/test_allreduce.py"]
    select = "test_sum and ring"           # of pytest's -k; may be empty
    why = "the sum would lack an addend"
    limit_s = 120                          # optional: tests that take longer hang

HPCLLM_MUTANT_TESTS is a command that starts tests: it is given the group and then the arguments of pytest, and its exit
code is pytest's. Without it pytest is started as tests/run.sh starts it, in the environment of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
KILLED, SURVIVED, STALE, BROKEN = "killed", "SURVIVED", "STALE", "BROKEN"
LIMIT_S = 120.0
NONE_COLLECTED, USAGE = 5, 4  # exit codes of pytest
TIMED_OUT = 124
MORE_S = 900.0  # for a job to start, perhaps after others
ENDING_S = 20.0  # from SIGTERM to SIGKILL
TOLD = 30_000  # characters of what tests say that are kept, from their end
SHOWN = 1500  # of those, of one verdict
NO_SHRINKING = "tests/mutants/no_shrinking.py"  # a plugin of pytest: the first example that fails is enough


@dataclass(frozen=True)
class Mutant:
    name: str
    room: str
    file: str
    find: str
    replace: str
    group: str
    tests: tuple[str, ...]
    why: str
    select: str = ""
    limit_s: float = LIMIT_S

    @property
    def selection(self) -> tuple[str, tuple[str, ...], str]:
        """Mutants with the same one are judged by the same tests."""
        return self.group, self.tests, self.select


@dataclass
class Verdict:
    mutant: Mutant
    word: str
    seconds: float = 0.0
    told: str = ""  # the end of what the tests said


@dataclass
class Tree:
    """A work tree in which one process at a time runs tests."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    job: subprocess.Popen[bytes] | None = None  # that runs tests now
    is_closed: bool = False  # no more tests are to begin

    def judge(self, mutant: Mutant) -> Verdict:
        path = self.root / mutant.file
        if not occurs_once(mutant.find, path):
            where = mutant.file if path.is_file() else f"{mutant.file}, which is not there"
            return Verdict(mutant, STALE, told=f"{where}: {mutant.find}")
        if missing := [test for test in mutant.tests if not (self.root / test.partition("::")[0]).exists()]:
            return Verdict(mutant, BROKEN, told=f"no {', '.join(missing)}")
        start_s = time.monotonic()
        with mutated(path, mutant):
            code, said = self.run_tests(mutant)
        seconds = time.monotonic() - start_s
        if code in (NONE_COLLECTED, USAGE, TIMED_OUT):
            return Verdict(mutant, BROKEN, seconds, said)
        if code == 0:
            return Verdict(mutant, SURVIVED if passed(said) else BROKEN, seconds, said)
        return Verdict(mutant, KILLED, seconds, said)

    def verify(self, mutant: Mutant) -> Verdict | None:
        """Verdict on the mutant's tests without the fault; None if they pass."""
        start_s = time.monotonic()
        code, said = self.run_tests(mutant)
        if code == 0 and passed(said):
            return None
        return Verdict(mutant, BROKEN, time.monotonic() - start_s, f"without the fault: {said}")

    def run_tests(self, mutant: Mutant) -> tuple[int, str]:
        """Exit code of pytest, or that of a killed job, and the end of its output."""
        options = ["-x", "-p", "no:cacheprovider", "-o", f"timeout={mutant.limit_s:.0f}"]
        if (self.root / NO_SHRINKING).exists():
            options += ["-p", "mutants.no_shrinking"]
        options += [*mutant.tests, *(["-k", mutant.select] if mutant.select else [])]
        line, environment = self._command(mutant.group, options)
        with tempfile.TemporaryFile() as output:
            self.job = subprocess.Popen(
                line, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = self.job.wait(2 * mutant.limit_s + MORE_S)  # pytest's own limit comes first
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                self.end()
            output.seek(0)
            return code, output.read().decode(errors="replace")[-TOLD:]

    def end(self) -> None:
        """No process of the job is left when this returns."""
        job, self.job = self.job, None
        if job is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(ENDING_S)
            os.killpg(job.pid, signal.SIGKILL)

    def _command(self, spec: str, options: list[str]) -> tuple[list[str], dict[str, str]]:
        environment = {**self.environment, "PYTHONDONTWRITEBYTECODE": "1"}
        if told := environment.get("HPCLLM_MUTANT_TESTS"):
            return [*shlex.split(told), spec, *options], environment
        mode, _, group = spec.rpartition(":")
        environment.pop("HPCLLM_PRETEND", None)
        if mode:
            environment["HPCLLM_PRETEND"] = mode
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.root), str(self.root / "tests"), before]))
        pytest = ["python", "-m", "pytest", "-q", "--color=no"]
        if group == "serial":
            return [sys.executable, *pytest[1:], "-m", "not parallel", *options], environment
        chosen = ["-p", "ranks", "-m", f"parallel and parallel[{group}]"]
        return ["bash", "jobscripts/local/mpirun.sh", group, *pytest, *chosen, *options], environment


@contextlib.contextmanager
def mutated(path: Path, mutant: Mutant) -> Iterator[None]:
    """The file has the fault while this is open; then it is the old one again, with its old times."""
    aside = path.with_name(path.name + ".before-mutant")
    shutil.copy2(path, aside)
    try:
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.find, mutant.replace), encoding="utf-8")
        yield
    finally:
        aside.replace(path)


def occurs_once(text: str, path: Path) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8").count(text) == 1


def passed(said: str) -> bool:
    """True if the end of pytest's output counts a test that passed."""
    return re.search(r"\b[1-9]\d* passed", said) is not None


def read(path: Path) -> list[Mutant]:
    """Raises ValueError, TypeError."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    if double := {mutant.name for mutant in mutants if [other.name for other in mutants].count(mutant.name) > 1}:
        raise ValueError(f"{path}: more than one mutant is called {', '.join(sorted(double))}")
    return mutants


@contextlib.contextmanager
def trees(root: Path, count: int) -> Iterator[list[Tree]]:
    """The work tree itself; or, for several, as many new ones that are like it, changed files included."""
    if count == 1:
        yield [Tree(root)]
        return
    environment = {"HPCLLM_VENV": str(root / ".venv"), **os.environ}
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            place = Path(folder) / str(number)
            git(root, "worktree", "add", "--quiet", "--detach", str(place), "HEAD")
            stack.callback(git, root, "worktree", "remove", "--force", str(place))
            for name in git(root, "ls-files", "-z", "--modified", "--others", "--exclude-standard").split("\0"):
                if name and (root / name).is_file():
                    (place / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, place / name)
                elif name:
                    (place / name).unlink(missing_ok=True)
            found.append(Tree(place, environment))
        try:
            yield found
        finally:
            for tree in found:
                tree.is_closed = True
                tree.end()


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout


def judge_all(mutants: list[Mutant], found: list[Tree], verify: bool) -> Iterator[Verdict]:
    """Each verdict as it comes; with one tree in the order of the mutants."""
    known: dict[tuple[str, tuple[str, ...], str], Verdict | None] = {}

    def judge(tree: Tree, mutant: Mutant) -> Verdict:
        if verify and mutant.selection not in known:
            known[mutant.selection] = tree.verify(mutant)
        broken = known.get(mutant.selection)
        return dataclasses.replace(broken, mutant=mutant) if broken else tree.judge(mutant)

    if len(found) == 1:  # in this thread, so that Ctrl-C ends the tests and puts the file back
        yield from (judge(found[0], mutant) for mutant in mutants)
        return
    todo, verdicts = queue.SimpleQueue[Mutant](), queue.SimpleQueue[Verdict]()
    for mutant in mutants:
        todo.put(mutant)

    def work(tree: Tree) -> None:
        with contextlib.suppress(queue.Empty):
            while not tree.is_closed:
                verdicts.put(judge(tree, todo.get_nowait()))

    for tree in found:
        threading.Thread(target=work, args=(tree,), daemon=True).start()
    for _ in mutants:
        yield verdicts.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="of the work tree to change and to test")
    parser.add_argument("--mutants", type=Path, default=HERE / "mutants.toml", metavar="FILE")
    parser.add_argument("--only", default="", metavar="NAME,...", help="of mutants or rooms")
    parser.add_argument("--verify", action="store_true", help="run each selection of tests without a fault as well")
    parser.add_argument("--stale", action="store_true", help="only look whether every text occurs once in its file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="work trees to test in at the same time")
    parser.add_argument("--told", action="store_true", help="show what the tests said of each mutant")
    arguments = parser.parse_args()
    mutants, only = read(arguments.mutants), {name for name in arguments.only.split(",") if name}
    if unknown := only - {name for mutant in mutants for name in (mutant.name, mutant.room)}:
        parser.error(f"no mutant or room is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not only or {mutant.name, mutant.room} & only]
    root, start_s = arguments.root.resolve(), time.monotonic()
    counts = dict.fromkeys((KILLED, SURVIVED, STALE, BROKEN), 0)
    if arguments.stale:
        stale = [mutant for mutant in chosen if not occurs_once(mutant.find, root / mutant.file)]
        for mutant in stale:
            print(f"{STALE:9} {mutant.room}: {mutant.name} ({mutant.file})")
        print(f"{len(chosen)} mutants, {len(stale)} {STALE}")
        return 1 if stale else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the file is put back then, too
    with trees(root, max(1, arguments.jobs)) as found:
        for verdict in judge_all(chosen, found, arguments.verify):
            counts[verdict.word] += 1
            mutant = verdict.mutant
            print(f"{verdict.word:9} {verdict.seconds:6.1f} s  {mutant.room}: {mutant.name}", flush=True)
            if verdict.told and (verdict.word in (STALE, BROKEN) or arguments.told):
                print("          " + verdict.told.strip()[-SHOWN:].replace("\n", "\n          "), flush=True)
    took = time.monotonic() - start_s
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{len(chosen)} mutants: {told} ({took:.0f} s)")
    return 0 if counts[KILLED] == len(chosen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
