"""Signals to one rank of running jobs: does every job end within its limit, in words, with a true exit code?

    python perf/faults.py [--count 60] [--seed 0] [--mpi mpich openmpi] [--resume]

    command under mpirun.sh --> at a random moment of its stage --> SIGKILL, SIGSTOP or SIGSEGV to a random rank
                                                                      |
    over within LIMIT_S?  rank or signal said?  exit code not 0?  not called finished?  no half file?  no process left?

Stages: MPI's start-up, prepare, train, save, generate, convert, verify, preflight, perf. Jobs are those of users,
limits.stall_s is 5 s. A job that was over before its signal came is tried again with the next draw. Results go to
faults.json beside this file, from where --resume goes on; exit code 1 if there was a fault. What launchers say is in
docs/how-to/batch-jobs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_suffix(".json")
MARK = "HPCLLM_FAULT"  # variable by which the processes of a job are found
STALL_S = 5.0
LIMIT_S = 6 * STALL_S + 30  # 6: mpi/wait.py's WORK; the rest for start, report and end of a job on a busy machine
COMES_S = 120.0  # for the moment of a stage to come
LEAVES_S = 5.0  # for the last processes of a job that is over
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV)
RANK_OF = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
RUN = """
run = {{name = "r", folder = "{folder}", steps = {steps}}}
model = {{layers = 2, hidden = {hidden}, heads = 4, tied = false}}
data = {{store = "{store}", sequence_length = 32, global_batch = 8, validation_sequences = 2}}
mesh = {{pp = 2}}
pipeline = {{microbatches = 4}}
checkpoint = {{every_steps = {every_steps}, keep = 2}}
log = {{every_steps = 1, trackers = []}}
limits = {{stall_s = {stall_s}}}
"""
# one of the job's sides has to say who or what: we name ranks and calls, launchers ranks, processes and signals
WORDS = re.compile(
    r"hpcllm: .*(rank \d|MPI_\w+)|rank \d+ \(|rank \d+ with PID|process rank|signal: (9|11)|exit code: (9|11)|"
    r"signal (9|11) |rank \d+ in MPI_\w+",
    re.IGNORECASE,
)


@dataclass
class Job:
    """A running command on some ranks, and what it has printed."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    def printed(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in list(self.lines))

    def output(self) -> str:
        self._reader.join(1)
        return "".join(self.lines)

    def ranks(self) -> dict[int, int]:
        """Return rank -> process of the job's ranks that live."""
        found = {}
        for number, variables in processes_of(self.mark):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{number}/cmdline").read_bytes()
                if b"\0-m\0hpcllm\0" in command and (rank := rank_in(variables)) is not None:
                    found[rank] = number
        return found


@dataclass(frozen=True)
class Stage:
    """Work in which a rank is hit: its command, the moment when it is under way, and for how long after that."""

    words: Callable[[Path, Path], list[str]]  # of the common folder and the case's
    is_under_way: Callable[[Job, Path], bool]
    spread_s: float
    left: str = ""  # what a job that failed leaves whole, because it was hit after that, or not at all


def train_words(common: Path, folder: Path, every_steps: int, hidden: int = 32) -> list[str]:
    values = {"store": common / "store.h5", "steps": 10**6, "every_steps": every_steps, "hidden": hidden}
    (folder / "run.toml").write_text(RUN.format(folder=folder, stall_s=STALL_S, **values))
    return ["train", str(folder / "run.toml")]


def prepare_words(common: Path, folder: Path) -> list[str]:
    return ["prepare", f"{common / 'text'}", "--output", f"{folder / 'prepared.h5'}", "--vocabulary", "2000"]


def generate_words(common: Path, _: Path) -> list[str]:
    return ["generate", f"{common / 'r'}", "--prompt", "the", "--tokens", "100000", "--pp", "2"]


def convert_words(common: Path, folder: Path) -> list[str]:
    return ["checkpoint", "convert", f"{common / 'large' / 'r'}", f"{folder / 'converted'}"]


def is_saving(_: Job, folder: Path) -> bool:
    """Return True while a checkpoint is being written, under a name of its own."""
    return any(path.suffix != ".h5" for path in (folder / "r" / "checkpoints").glob("*"))


def has_ranks(job: Job, _: Path) -> bool:
    return len(job.ranks()) == 2


STALL = ["--stall-s", f"{STALL_S}"]
STAGES = {
    "start-up": Stage(lambda common, folder: train_words(common, folder, 0), has_ranks, 4.0),
    "prepare": Stage(lambda *folders: prepare_words(*folders) + STALL, has_ranks, 6.0, "prepared.h5"),
    "train": Stage(
        lambda common, folder: train_words(common, folder, 0), lambda job, _: job.printed(r"^step +3/"), 2.0
    ),
    "save": Stage(lambda common, folder: train_words(common, folder, 2, 256), is_saving, 0.0),
    "generate": Stage(lambda *folders: generate_words(*folders) + STALL, has_ranks, 1.5),
    "convert": Stage(lambda *folders: convert_words(*folders) + STALL, has_ranks, 4.0, "converted"),
    "verify": Stage(lambda common, _: ["checkpoint", "verify", f"{common / 'large' / 'r'}", *STALL], has_ranks, 3.0),
    "preflight": Stage(lambda _, __: ["preflight", *STALL], has_ranks, 9.0),
    "perf": Stage(lambda _, __: ["perf", "allreduce", "--sizes", "1M", *STALL], has_ranks, 9.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mpi", nargs="+", default=["mpich", "openmpi"])
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    known: dict[str, Any] = {"seed": arguments.seed, "draws": 0, "cases": []}
    if arguments.resume and RESULTS.exists():
        known = json.loads(RESULTS.read_text())
    kinds = [(mpi, stage) for mpi in arguments.mpi for stage in arguments.stages]
    with tempfile.TemporaryDirectory(prefix="hpcllm faults ") as name:
        common = Path(name)
        make_common(common)
        while len(known["cases"]) < arguments.count:
            draw = random.Random(f"{known['seed']} {known['draws']}")
            mpi, stage = kinds[len(known["cases"]) % len(kinds)]
            found = hit(common, mpi, stage, draw.choice(SIGNALS), draw.randrange(2), draw.random())
            known["draws"] += 1
            if found:
                known["cases"].append(found)
                print(line_of(found), flush=True)
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    wrong = sum(bool(case["wrong"]) for case in known["cases"])
    print(f"{len(known['cases'])} cases, {wrong} faults")
    return 1 if wrong else 0


def make_common(folder: Path) -> None:
    """Make text, a store, a small run and a larger one, which the jobs read."""
    (folder / "text").mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    for number in range(60):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=20_000)))
    few = [str(folder / "text" / f"{number}.txt") for number in range(9)]
    few += ["--output", f"{folder / 'store.h5'}", "--vocabulary", "400", "--validation-fraction", "0.3"]
    alone(["prepare", *few])
    for where, hidden in ((folder, 32), (folder / "large", 512)):
        where.mkdir(exist_ok=True)
        one = ["--set=mesh.pp=1", "--set=run.steps=1"]
        alone([*train_words(folder, where, 0, hidden), *one])
    for words in (prepare_words, convert_words):
        alone(words(folder, folder))


def bytes_of(path: Path) -> dict[str, bytes]:
    """Return name -> content of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def alone(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run one command in one process; its faults are those of this script."""
    command = [sys.executable, "-m", "hpcllm", *words]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, text=True)


def hit(common: Path, mpi: str, stage: str, number: signal.Signals, rank: int, moment: float) -> dict[str, Any] | None:
    """Start a job and hit one rank; a record, or None if the job was over before. moment: 0 to 1 of the stage."""
    plan = STAGES[stage]
    case: dict[str, Any] = {"mpi": mpi, "stage": stage, "signal": number.name, "rank": rank}
    with tempfile.TemporaryDirectory(prefix="hpcllm fault ") as name, ExitStack() as stack:
        folder = Path(name)
        job = stack.enter_context(started(plan.words(common, folder), mpi))
        if not came(job, lambda: plan.is_under_way(job, folder)):
            return None
        time.sleep(moment * plan.spread_s)
        process = job.ranks().get(rank)
        if process is None:
            return None
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return None
        hit_s = time.monotonic()
        try:
            code: int | None = job.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        ended_s = round(time.monotonic() - hit_s, 1)
        case |= {"after_s": round(moment * plan.spread_s, 2), "ended_s": ended_s, "code": code}
        return case | judge(plan, common, folder, job, code)


def came(job: Job, is_true: Callable[[], bool]) -> bool:
    """Wait for a moment of a job; False if the job is over before."""
    end_s = time.monotonic() + COMES_S
    while job.process.poll() is None and time.monotonic() < end_s:
        if is_true():
            return True
        time.sleep(0.002)
    return False


def judge(plan: Stage, common: Path, folder: Path, job: Job, code: int | None) -> dict[str, Any]:
    """Return what is wrong with the end of a job, and its last lines."""
    left_s = time.monotonic() + LEAVES_S
    while code is not None and (left := dict(processes_of(job.mark))) and time.monotonic() < left_s:
        time.sleep(0.1)
    output = job.output()
    wrong = []
    if code is None:
        wrong.append(f"not over after {LIMIT_S:g} s")
    if code == 0:
        wrong.append("exit code 0")
    if not WORDS.search(output):
        wrong.append("no words")
    if code is not None and left:
        wrong.append(f"{len(left)} processes left")
    if plan.left and (folder / plan.left).exists() and bytes_of(folder / plan.left) != bytes_of(common / plan.left):
        wrong.append(f"{plan.left} was left half")
    if (folder / "run.toml").exists() and is_finished(folder):
        wrong.append("called finished")
    said = [line.strip() for line in output.splitlines() if WORDS.search(line)]
    return {"wrong": wrong, "said": said[:3], "last": output[-1500:] if wrong else ""}


def is_finished(folder: Path) -> bool:
    command = [sys.executable, "-m", "hpcllm", "train", str(folder / "run.toml"), "--is-finished"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 1


@contextlib.contextmanager
def started(words: list[str], mpi: str) -> Iterator[Job]:
    """Start a command of ours on two ranks; at the end nothing of it is left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    bash = shutil.which("bash") or "bash"
    process = subprocess.Popen(
        [bash, "jobscripts/local/mpirun.sh", "2", "python", "-m", "hpcllm", *words],
        cwd=ROOT,
        env=kept | {"HPCLLM_MPI": mpi, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield Job(process, mark)
    finally:
        for number, _ in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()


def processes_of(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield number and environment of the processes of a job."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            text = (folder / "environ").read_bytes().decode(errors="replace")
            variables = dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)
            if variables.get(MARK) == mark:
                yield int(folder.name), variables


def rank_in(variables: dict[str, str]) -> int | None:
    return next((int(variables[name]) for name in RANK_OF if name in variables), None)


def line_of(case: dict[str, Any]) -> str:
    what = f"{case['mpi']:<8} {case['stage']:<9} {case['signal']:<8} rank {case['rank']} at +{case['after_s']:.2f} s"
    end = f"over after {case['ended_s']:5.1f} s, code {case['code']}"
    return f"{what}: {end}{'  WRONG: ' + ', '.join(case['wrong']) if case['wrong'] else ''}"


if __name__ == "__main__":
    sys.exit(main())
