"""Run a check: start the ranks, watch their records, end them, and say what became of it.

    job.json --> mpirun -n 4 python -m hpcllm.course.ranks FOLDER
                      rank_0.jsonl ... rank_3.jsonl grow  -->  read every 50 ms
                      |- "wrong" on a rank:      a moment for the others to say theirs, then all are ended
                      |- nothing new for too long: the stacks of the ranks say who waits where: deadlock or endless loop
                      `- a rank's process, or the job, is over without "done": a crash; is stopped: by a signal

Whatever the student's file does, the processes of the check end (processes.py). Limits of memory, files and processor
time are those of ranks.py; what ranks print is kept to a bound. It is no prison: a file that wants to harm can, as any
program of this user. Grade strangers' files in a container, or as a user who owns nothing.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcllm.course.catalogue import Entry
from hpcllm.course.lab import RANKS
from hpcllm.course.launch import launch_command, scratch_parent
from hpcllm.course.processes import Job, job, leaving_at_signals, state_of, undisturbed, where_pids_count
from hpcllm.errors import HpcllmError

START_S = 180.0  # for all ranks to start on a busy machine
LOAD_S = 30.0  # for the student's file to be loaded
WHOLE_S = 290.0  # of a check
GRACE_S = 1.0  # for other ranks to say what they found
END_S = 5.0  # for ranks that are done to leave MPI
MEMORY_BYTES = 1 << 30  # that a rank may ask for beside what it has when the student's file is loaded
LOOK_S = 0.05
MOST_RECORD_BYTES = 1 << 24  # of a rank; more is not read
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in ', re.MULTILINE)
CALLS = (
    r"[Ww]ait\w*|\w*[Ss]end\w*|\w*[Rr]ecv\w*|[Pp]robe|Test\w*|[Bb]arrier|\w*[Ss]can|"
    r"I?([Aa]ll|[Gg]ather|[Rr]educe|[Bb]cast|[Ss]catter)\w*"
)
WAITS = re.compile(rf"\b({CALLS})\(")
NOT_BY_THE_WORLD = (  # what a file does wrong whichever communicator it uses
    *("borrowed", "endless", "files", "forbidden", "form", "length", "memory", "missing", "not_yours", "stopped"),
    *("tampered", "unfinished"),
)
Record = dict[str, Any]


@dataclass
class Outcome:
    """Records of all ranks, and what ended the check early, if anything did."""

    records: list[list[Record]]  # of each rank
    fault: Record | None = None  # hint, shown; stage, part, ranks, case where they are known
    output: str = ""  # the end of what the ranks printed, and what mpirun or srun said of their end
    printed: str = ""  # the end of what the ranks had printed before they were ended
    seconds: float = 0.0

    @property
    def library(self) -> str:
        """Name of the MPI library, as rank 0 said it."""
        return str(next((record.get("library", "") for record in self.of_rank_0("ready")), ""))[:80]

    def of_rank_0(self, event: str) -> list[Record]:
        return [record for record in self.records[0] if record["event"] == event]


@dataclass
class _Watch:
    """The records so far, and when the last of them came."""

    folder: Path
    records: list[list[Record]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    read_bytes: list[int] = field(default_factory=lambda: [0] * RANKS)
    last_s: float = field(default_factory=time.monotonic)
    are_files_gone: bool = False

    def look(self) -> None:
        """Read what ranks have added. A line that is no record of ours counts as none."""
        for rank in range(RANKS):
            try:
                self._read(rank)
            except OSError as error:  # not there yet, or no more
                self.are_files_gone |= self.read_bytes[rank] > 0 and not isinstance(error, BlockingIOError)

    def _read(self, rank: int) -> None:
        with (self.folder / f"rank_{rank}.jsonl").open("rb") as file:
            file.seek(self.read_bytes[rank])
            data = file.read(max(0, MOST_RECORD_BYTES - self.read_bytes[rank]))
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self.read_bytes[rank] += len(whole)
            self.last_s = time.monotonic()
            self.records[rank] += _parsed(whole)

    def lost(self) -> Record | None:
        """Return the fault of a rank whose process on this machine is over or stopped; None while there is none."""
        if self.are_files_gone or not self.folder.exists():
            return {"hint": "files", "shown": "the folder of the check was removed"}
        for rank, rows in enumerate(self.records):
            is_here = bool(rows) and rows[0].get("host") == where_pids_count() and isinstance(rows[0].get("pid"), int)
            state = state_of(rows[0]["pid"]) if is_here and rows[-1]["event"] != "done" else "R"
            if state in ("T", "t"):
                return {"hint": "stopped", "shown": f"the process of rank {rank} was stopped"}
            if state in ("", "Z", "X"):
                return {"hint": "crash", "shown": f"the process of rank {rank} ended before the check was over"}
        return None

    def wrong(self) -> list[Record]:
        return [record for rows in self.records for record in rows if record["event"] == "wrong"]

    def is_done(self) -> bool:
        return all(rows and rows[-1]["event"] == "done" for rows in self.records)

    def limit_s(self) -> float:
        """Seconds without a record after which the check hangs."""
        started = [rows[-1] for rows in self.records if rows and rows[-1]["event"] == "start"]
        if not all(self.records):
            return START_S
        return max((float(record["limit_s"]) for record in started), default=START_S)


def _parsed(data: bytes) -> Iterator[Record]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("event"), str):
                yield record


def run_check(entry: Entry, file: Path | None, seed: str, advance: Callable[[str], None]) -> Outcome:
    """Run all stages of a lab on a student's file; None: on our own functions, without laws. Raises ConfigError.

    advance: gets a word when a law holds or a race is run.
    """
    with leaving_at_signals(), _scratch() as folder:
        order: Record = {"lab": entry.name, "file": str(file) if file else None, "seed": seed}
        order |= {"memory_bytes": MEMORY_BYTES, "load_s": LOAD_S, "end_s": WHOLE_S}
        (folder / "job.json").write_text(json.dumps(order), encoding="utf-8")
        start_s = time.monotonic()
        words, environment = launch_command(RANKS, scratch=folder)
        with job([*words, sys.executable, "-m", "hpcllm.course.ranks", str(folder)], folder, environment) as started:
            outcome = _watch(started, _Watch(folder), file, advance)
            outcome.printed = started.output.decode("utf-8", "replace")
        if outcome.fault and outcome.fault["hint"] not in NOT_BY_THE_WORLD and file and _uses_world(file):
            outcome.fault["hint"] = "world"
        outcome.output = started.output.decode("utf-8", "replace")
        outcome.seconds = time.monotonic() - start_s
    fault = outcome.fault
    if not all(outcome.records) and fault and fault.get("stage") is None and fault["hint"] != "files":
        said = outcome.output.strip()[-500:]
        raise HpcllmError(f"the ranks of the check did not start: {said or fault['shown']}")
    return outcome


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that all ranks see, removed whatever lies in it, and whatever signal comes meanwhile."""
    made = tempfile.TemporaryDirectory(prefix="hpcllm-course-", dir=scratch_parent(), ignore_cleanup_errors=True)
    try:
        yield Path(made.name)
    finally:
        with undisturbed():
            made.cleanup()


def _uses_world(file: Path) -> bool:
    """Return True if COMM_WORLD is named in the file's code; in a comment it does no harm."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = (getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) for node in ast.walk(tree))
    return "COMM_WORLD" in names


def _watch(started: Job, watch: _Watch, file: Path | None, advance: Callable[[str], None]) -> Outcome:
    """Follow the records until the job is over, or has to be."""
    begin_s, told, process = time.monotonic(), 0, started.process
    while True:
        ended = process.poll() is not None
        lost = watch.lost()  # before the records are read: those of a rank that is gone are complete then
        watch.look()
        told = _tell(started, watch.records, told, advance)
        if watch.is_done():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return Outcome(watch.records)
        if watch.wrong():
            _wait_for_others(process, watch)
            return Outcome(watch.records, _clearest(watch.wrong()))
        if lost and watch.lost():
            return Outcome(watch.records, _place(watch) | lost | {"shown": lost["shown"] + _where(watch, file)})
        if ended:
            words = f"the job ended with exit code {process.returncode} before the check was over"
            return Outcome(watch.records, _place(watch) | {"hint": "crash", "shown": words + _where(watch, file)})
        now_s = time.monotonic()
        if now_s - watch.last_s > watch.limit_s() or now_s - begin_s > WHOLE_S:
            return Outcome(watch.records, _place(watch) | _hanging(watch, file))
        time.sleep(LOOK_S)


def _tell(started: Job, records: Sequence[list[Record]], told: int, advance: Callable[[str], None]) -> int:
    """Hand on what is new in the records; return how many of rank 0 are told."""
    for rows in records:
        if rows and rows[0]["event"] == "ready":
            started.note(rows[0])
    for record in records[0][told:]:
        if record["event"] in ("held", "row", "measured"):
            advance(record["event"])
    return len(records[0])


def _wait_for_others(process: subprocess.Popen[bytes], watch: _Watch) -> None:
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and process.poll() is None and len(watch.wrong()) < RANKS:
        time.sleep(LOOK_S)
        watch.look()


def _clearest(wrong: Sequence[Record]) -> Record:
    """Choose among what several ranks found: a named mistake goes before an exception or a mere difference."""
    vague = ("other", "exception", "truncated", "not_waited", "message_left")
    return min(wrong, key=lambda record: record["hint"] in vague and 1 + vague.index(record["hint"]))


def _place(watch: _Watch) -> Record:
    """Say where the check was: the last part that was started and has not ended."""
    last = [rows[-1] for rows in watch.records if rows and rows[-1]["event"] == "start"]
    keys = ("stage", "part", "ranks", "case")
    return {key: last[0][key] for key in keys if key in last[0]} if last else {}


def _where(watch: _Watch, file: Path | None) -> str:
    """' (line 12: x = y[0])' where the system has ended a rank in the student's file."""
    lines = _lines_of(file)
    found = (_line_of(watch.folder / f"stack_{rank}.txt", file, lines) for rank in range(RANKS))
    place = next(filter(None, found), None)
    return f" (line {place[0]}: {place[1]})" if place else ""


def _lines_of(file: Path | None) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file else []


def _hanging(watch: _Watch, file: Path | None) -> Record:
    """Tell a deadlock from an endless loop by where the ranks were."""
    lines = _lines_of(file)
    places = {
        int(rows[-1].get("rank", number)): _line_of(watch.folder / f"stack_{number}.txt", file, lines)
        for number, rows in enumerate(watch.records)
        if rows and rows[-1]["event"] == "start"  # the others were not asked, or have come back
    }
    stuck = {rank: place for rank, place in places.items() if place}
    busy = {rank: place for rank, place in stuck.items() if not WAITS.search(place[1])}
    hint = "endless" if busy else "deadlock"
    named = sorted((busy or stuck).items())
    shown = "; ".join(f"rank {rank} at line {number}: {text}" for rank, (number, text) in named)
    back = sorted(set(places) - set(stuck))
    if stuck and not busy and back:
        shown += f"; rank{'s' * (len(back) > 1)} {', '.join(map(str, back))}: back from your function"
    return {"hint": hint, "shown": shown or "no rank was in your file"}


def _line_of(stack: Path, file: Path | None, lines: Sequence[str]) -> tuple[int, str] | None:
    """Return the innermost line of the student's file in a stack, and its text."""
    try:
        text = stack.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    numbers = [int(found["line"]) for found in FRAME.finditer(text) if found["file"] == str(file)]
    if not numbers or not 1 <= numbers[0] <= len(lines):
        return None
    return numbers[0], lines[numbers[0] - 1].strip()
