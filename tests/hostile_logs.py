"""Run folders that something has damaged, made from a seed: logs, traces, events, job files; never a checkpoint.

    mutants(seed)             endless: ("log.jsonl: NUL", damage), ...
    goes_on(sound, ...)       damages a copy of a sound run and lets it make its last step

The law: a run that has a sound checkpoint goes on from it. For tests/training/test_damaged_run_folder.py, a few dozen;
and by `python tests/hostile_logs.py COUNT SEED`, which prints what does not hold.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile import within
from mpi4py import MPI
from small_runs import tiny

from hpcllm.config.schema import Config
from hpcllm.report.run_folder import read_log
from hpcllm.system.job import StopSignals
from hpcllm.training.finished import read_progress
from hpcllm.training.loop import train

Damage = Callable[[Path], None]
READ = ["log.jsonl", "log.jsonl.tmp", "log.jsonl.damaged", "job.txt", "ranks.txt", "run.toml", "finished"]
READ += ["trackers.json", "events.out.tfevents.1.host.1.0"]
FILES = [*READ, "trace/step_00000003.json", "trace/step_00000003.json.tmp", "trace"]
JUNK = (b"\0", b"\xff\xfe", b"[" * 100_000, b'{"step": 1' + b"0" * 400 + b"}", b"\x80" * 300, b"{}", b"null", b"\r")
VALUES: tuple[Any, ...] = (None, True, -1, 10**400, 1e308, float("nan"), float("inf"), "x", "\x1b[2J", [], {}, [[]])
KEYS = ["step", "node_hours", "core_hours", "energy_kwh", "energy_tokens", "energy_scope", "cost", "loss", "start"]
FIRST, LAST = 2, 3  # steps of a run before the damage, and after
LIMIT_S = 30  # of a run that takes less than one


def mutants(seed: int) -> Iterator[tuple[str, Damage]]:
    """Yield damages with their names."""
    draw = random.Random(seed)
    kinds = (_bytes, _bytes, _lines, _lines, _values, _replaced, _replaced)
    while True:
        yield draw.choice(kinds)(draw)


def _bytes(draw: random.Random) -> tuple[str, Damage]:
    """A file with other bytes in some places, or its end cut off."""
    name, places = draw.choice(READ), draw.randint(1, 20)
    random_bytes, cut = draw.randbytes(places), draw.random() < 0.3
    where = [draw.random() for _ in range(places)]

    def damage(folder: Path) -> None:
        data = bytearray(_content(folder / name))
        for place, byte in zip(where, random_bytes, strict=True):
            data[int(place * len(data))] = byte
        (folder / name).write_bytes(data[: int(where[0] * len(data))] if cut else data)

    return f"{name}: {'cut' if cut else f'{places} bytes'}", damage


def _lines(draw: random.Random) -> tuple[str, Damage]:
    """A file with lines that are junk, or that are there twice."""
    name, junk, place = draw.choice(READ), draw.choice((*JUNK, b"")), draw.random()

    def damage(folder: Path) -> None:
        lines = io.BytesIO(_content(folder / name)).readlines()
        at = int(place * (len(lines) + 1))
        lines[at:at] = [junk + b"\n"] if junk else lines
        (folder / name).write_bytes(b"".join(lines))

    return f"{name}: {junk[:12]!r}" if junk else f"{name}: lines twice", damage


def _values(draw: random.Random) -> tuple[str, Damage]:
    """Records of the log that say what no job says."""
    keys = {draw.choice(KEYS): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}
    record = json.dumps({"step": 1, "node_hours": 0.5, "energy_kwh": 1.0, "energy_tokens": 9} | keys)

    def damage(folder: Path) -> None:
        with (folder / "log.jsonl").open("a") as file:
            file.write(record + "\n")

    return f"log.jsonl: {keys}"[:100], damage


def _replaced(draw: random.Random) -> tuple[str, Damage]:
    """Something else under the name of a file."""
    name, kind = (
        draw.choice(FILES),
        draw.choice(("folder", "full folder", "pipe", "loop", "endless", "sparse", "nowhere", "empty")),
    )
    if name == "trace" and kind == "empty":
        kind = "pipe"

    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        REPLACE[kind](path)

    return f"{name}: {kind}", damage


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "in it").touch()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


REPLACE: dict[str, Damage] = {
    "folder": Path.mkdir,
    "full folder": _full_folder,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "sparse": _sparse,
    "nowhere": lambda path: path.symlink_to("/none/such"),
    "empty": Path.touch,
}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() and path.stat().st_size else b"a line\n"


def config_of(parent: Path, steps: int) -> Config:
    return tiny(
        run={"folder": str(parent), "steps": steps},
        checkpoint={"every_steps": 1},
        data={"validation_sequences": 2},
        log={"every_steps": 1, "trackers": ["tensorboard"], "trace_steps": [steps], "validation_every_steps": 0},
    )


def begun(parent: Path) -> Path:
    """Make a run that has made its first steps; returns its folder's parent."""
    made(parent / "sound", FIRST, MPI.COMM_SELF)
    return parent / "sound"


def made(parent: Path, steps: int, comm: MPI.Intracomm) -> None:
    with StopSignals() as signals:
        train(config_of(parent, steps), comm, signals)


def goes_on(sound: Path, parent: Path, damage: Damage, comm: MPI.Intracomm) -> None:
    """Damage a copy of a run and let it go on: it makes its last step from the checkpoint, and says so."""
    shutil.copytree(sound, parent)
    damage(parent / "r")
    with within(LIMIT_S):
        made(parent, LAST, comm)
    assert read_progress(parent / "r", LAST).is_finished
    steps = read_log(parent / "r" / "log.jsonl").loss[0]
    assert list(steps)[-1] == LAST


def campaign(count: int, seed: int) -> int:
    """Try so many mutants of one run; returns how many do not hold."""
    found, draws = 0, mutants(seed)
    with tempfile.TemporaryDirectory(prefix="hpcllm damaged ") as name:
        sound = begun(Path(name))
        for number in range(count):
            what, damage = next(draws)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    goes_on(sound, Path(name) / str(number), damage, MPI.COMM_SELF)
                    fault = ""
                except BaseException:
                    fault = traceback.format_exc()
            if fault:
                found += 1
                print(f"{number} {what}\n{fault}", flush=True)
            shutil.rmtree(Path(name) / str(number), ignore_errors=True)
    print(f"{count} mutants, {found} faults")
    return found


if __name__ == "__main__":
    sys.exit(bool(campaign(*map(int, sys.argv[1:3]))))
