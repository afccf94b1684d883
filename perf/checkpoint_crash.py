"""Kill -9 of a random rank at a random instant, again and again: does every restart find a valid checkpoint?

    python perf/checkpoint_crash.py STORE [--kills 200] [--minutes 60]

    reference   start ---------------------------------------------> end     tensors and losses, undisturbed
    episode     start --- kill | start -------- kill | start ------> end     the same tensors and losses, or a fault
                               '- goes on from the newest file          (a third of the kills: while one is written)

An episode is one run folder: it is killed a few times, then left to end. Of each kill: what was being done, and which
checkpoint the next start went on from, which must be the newest that has its name: none may be passed over, none lost.
Jobs are those of users, `mpirun -n R python -m hpcllm train`. Writes checkpoint_crash.json and checkpoint_crash.md
after each episode; a second call goes on where the first one stopped. Ends with exit code 1 at the first fault.
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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "checkpoint_crash.json"
LIMIT_S = 180.0  # of a start
ENDS_S = 60.0  # for a job to end once a rank of it is killed
POLL_S = 0.0005
KILLS_AN_EPISODE = 4
RANKS = (2, 2, 2, 3, 1)  # mostly two
# keys of a run: error feedback, shards and a pipeline all have to come back
LAYOUTS = {
    1: {"precision.compute": "fp32"},
    2: {"mesh.dp": 2, "optimizer.shard": "states", "communication.gradients": "int4:128+ef"},
    3: {"mesh.dp": 3, "optimizer.shard": "states+gradients", "communication.gradients": "int8:256+ef"},
}
RUN = {
    "run.name": "r",
    "run.steps": 24,
    "model.preset": "tiny",
    "model.hidden": 192,
    "model.ffn": 512,
    "data.sequence_length": 32,
    "data.global_batch": 6,
    "data.validation_sequences": 6,
    "communication.exact_steps": 2,
    "optimizer.warmup_steps": 5,
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 2,
    "log.every_steps": 1,
    "log.trackers": [],
    "limits.stall_s": 60.0,
}
Record = dict[str, Any]


class FaultError(Exception):
    """Something that a crash must not do."""


@dataclass(frozen=True)
class Outcome:
    """What a whole run leaves, whichever way it came there."""

    losses: dict[int, float]
    checksums: dict[str, Any]  # of the blocks of the last checkpoint, and its datasets


def start(store: str, folder: Path, ranks: int) -> subprocess.Popen[str]:
    """A job as a user starts it; its own group of processes."""
    keys = {**RUN, **LAYOUTS[ranks], "data.store": store, "run.folder": str(folder)}
    (folder / "run.toml").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "hpcllm", "train", str(folder / "run.toml")]
    command += [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher(), "-n", str(ranks), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | allowed,
        start_new_session=True,
    )


def launcher() -> list[str]:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        sys.exit("there is no mpirun")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    return [mpirun, "--oversubscribe"] if "Open MPI" in version else [mpirun]


def ranks_of(folder: Path) -> list[int]:
    """Processes of the job that are Python: its ranks, whoever launched them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"hpcllm" in words and str(folder / "run.toml").encode() in words and b"-m" in words[:3]:
                    found.append(int(entry.name))
    return found


def temporaries(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(folder / "r" / "checkpoints") if ".tmp-" in name]
    return []


def checkpoints(folder: Path) -> list[int]:
    """Steps of the files that have their name."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder / "r" / "checkpoints")
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d+)\.h5", name)))
    return []


def kill_once(job: subprocess.Popen[str], folder: Path, rng: random.Random, in_write: bool, span_s: float) -> bool:
    """Kill a random rank at a random instant; whether a file was being written then. False also if the job had ended.

    in_write: wait for the file that a write begins with, one of the next three, and then for a moment of up to 60 ms.
    """
    if in_write:
        for _ in range(rng.randint(1, 3)):
            _wait(job, folder, being_written=False)
            _wait(job, folder, being_written=True)
        time.sleep(rng.random() * 0.06)
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(rng.random() * span_s)
    victims = ranks_of(folder)
    if job.poll() is not None or not victims:
        return False
    before = temporaries(folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(victims), signal.SIGKILL)
    return bool(before)


def _wait(job: subprocess.Popen[str], folder: Path, being_written: bool) -> None:
    while job.poll() is None and bool(temporaries(folder)) is not being_written:
        time.sleep(POLL_S)


def end(job: subprocess.Popen[str], limit_s: float) -> str:
    """Wait for the job's end; what it said. Raises FaultError if it does not end."""
    try:
        said, _ = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        said, _ = job.communicate()
        raise FaultError(f"the job did not end within {limit_s:.0f} s: {said[-500:]}") from None
    return said


def went_on_from(said: str) -> int:
    """The step that a start says it goes on from; 0: from none. Raises FaultError where it passed a file over."""
    if "passed over" in said or "hpcllm: error" in said:
        raise FaultError(f"a start did not like what it found: {said[:800]}")
    match = re.search(r"goes on from .* at step (\d+)", said)
    return int(match[1]) if match else 0


def outcome(folder: Path) -> Outcome:
    losses = {}
    for line in (folder / "r" / "log.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses[record["step"]] = (record["loss"], record["samples"])
    newest = checkpoints(folder)[-1]
    with h5py.File(folder / "r" / "checkpoints" / f"step_{newest:08d}.h5", "r", locking=False) as file:
        found = {"newest": newest, "checksums": file["checksums"][()].tolist()}
        file.visit(lambda name: found.update({name: True}))
    return Outcome(losses, found)


def reference(store: str, ranks: int) -> tuple[Outcome, float]:
    """What an undisturbed run leaves, and the seconds that it takes."""
    with run_folder() as folder:
        began_s = time.monotonic()
        job = start(store, folder, ranks)
        said = end(job, LIMIT_S)
        if job.returncode != 0:
            raise FaultError(f"the undisturbed run failed: {said[-800:]}")
        return outcome(folder), time.monotonic() - began_s


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="crash "))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a run that went wrong is left to be looked at


def episode(store: str, ranks: int, want: Outcome, whole_s: float, kills: int, rng: random.Random) -> list[Record]:
    """A run that is killed so many times and then left to end as `want`. Raises FaultError."""
    records: list[Record] = []
    with run_folder() as folder:
        for _ in range(kills):
            in_write = rng.random() < 0.35
            had = checkpoints(folder)
            job = start(store, folder, ranks)
            was_written = kill_once(job, folder, rng, in_write, whole_s)
            said = end(job, ENDS_S)
            if job.returncode == 0:
                break
            found = went_on_from(said)
            if had and not found and "M parameters" in said:  # it had come that far
                raise FaultError(f"{folder}: began anew, though there was {had}: {said[:800]}")
            if found and found != had[-1]:
                raise FaultError(f"{folder}: went on from step {found}, but the newest was {had[-1]}")
            records.append({"ranks": ranks, "in_write": was_written, "from": found, "left": checkpoints(folder)})
        had = checkpoints(folder)
        job = start(store, folder, ranks)
        said = end(job, LIMIT_S)
        if job.returncode != 0 or went_on_from(said) != (had[-1] if had else 0):
            raise FaultError(f"{folder}: the last start, with {had}, ended with {job.returncode}: {said[-800:]}")
        if outcome(folder) != want:
            raise FaultError(f"{folder}: ended otherwise than the undisturbed run")
        if stale := temporaries(folder):
            raise FaultError(f"{folder}: left {stale}")
    return records


def write_down(records: list[Record], seconds: float) -> None:
    RECORDS.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
    lines = [
        "# A rank is killed",
        "",
        "`python perf/checkpoint_crash.py STORE`: kill -9 of a random rank at a random instant, then the same command.",
        "Every start went on from the newest checkpoint that had its name (or from the beginning, where none was whole",
        "yet), none was passed over, and every run ended with the tensors, losses and samples of the undisturbed one,",
        f"bit for bit. Runs of {RUN['run.steps']} steps, a checkpoint every {RUN['checkpoint.every_steps']}, written",
        "behind the training.",
        "",
        "| ranks | kills | while a file was written | before the first checkpoint was whole |",
        "|---|---|---|---|",
    ]
    for ranks in sorted({record["ranks"] for record in records}):
        of = [record for record in records if record["ranks"] == ranks]
        early = sum(not record["left"] for record in of)
        lines.append(f"| {ranks} | {len(of)} | {sum(record['in_write'] for record in of)} | {early} |")
    lines += ["", f"{len(records)} kills; the last call took {seconds / 60:.0f} minutes."]
    RECORDS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a token store, written by `hpcllm prepare`")
    parser.add_argument("--kills", type=int, default=200, help="in all, those of earlier calls too")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after the episode in which they are over")
    arguments = parser.parse_args()
    records: list[Record] = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else []
    rng, began_s = random.Random(len(records)), time.monotonic()
    wanted: dict[int, tuple[Outcome, float]] = {}
    episodes = 0
    try:
        while len(records) < arguments.kills and time.monotonic() - began_s < 60 * arguments.minutes:
            ranks = RANKS[(len(records) // KILLS_AN_EPISODE + episodes) % len(RANKS)]
            episodes += 1
            if ranks not in wanted:
                wanted[ranks] = reference(arguments.store, ranks)
            records += episode(arguments.store, ranks, *wanted[ranks], KILLS_AN_EPISODE, rng)
            write_down(records, time.monotonic() - began_s)
            inside = sum(record["in_write"] for record in records)
            print(f"{len(records)} kills, {inside} inside a write, {time.monotonic() - began_s:.0f} s", flush=True)
    except FaultError as fault:
        print(f"FAULT: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
