"""Laws about orders, faults, deaths and losses of power, on forked ranks: `python -m ...scenarios JOB.json`.

    checks.py, rank 0  --JOB.json-->  scenarios.py: loads the student's file, forks ranks by the hundred
                      <--JOB.json.result--  [] or [hint, what was shown]

Every scenario begins with a folder that has the whole checkpoint of an older step, and ends with a look at the folder
by processes that know nothing of what happened. MPI is loaded and never started: the environment says so, by
MPI4PY_RC_INITIALIZE.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcllm.course.lab import LawError
from hpcllm.course.labs.checkpoint import forked
from hpcllm.course.labs.checkpoint.bench import NEW, OLD, Bench, orders, points, written
from hpcllm.course.labs.checkpoint.disk import losses
from hpcllm.course.labs.checkpoint.scheduler import Fault, Run
from hpcllm.course.labs.checkpoint.states import path_of
from hpcllm.course.student_file import load_file

CAN_FAIL = ("open", "write", "sync", "rename")


def check_orders(bench: Bench) -> None:
    """Save in many orders: the file is whole in each. If it is in none, other laws say why."""
    wrong, right = "", 0
    for told, order in [("all ranks in step", []), *orders(bench.ranks)]:
        folder = bench.fresh()
        ran = bench.save(folder, NEW, bench.new, order)
        _check_ended(ran, told)
        raised = [f"{end.value} on rank {rank}" for rank, end in enumerate(ran.ends) if end and end.how == "raised"]
        number, seen = bench.newest(folder, [(NEW, bench.new)])
        right += number == 0 and not raised
        wrong = wrong or (f"{told}: {(raised or [seen])[0]}" if number or raised else "")
    if wrong and right:
        raise LawError("order", wrong)


def _check_ended(ran: Run, told: str) -> None:
    if not all(ran.ends) and all(end is None or end.how == "returned" for end in ran.ends):
        waits = "; ".join(f"rank {rank} waits in comm.{name}" for rank, name in enumerate(ran.waiting) if name)
        raise LawError("deadlock", f"{told}: {waits}")


def check_at_once(bench: Bench) -> None:
    """Let one rank after another stop at its first write: the others write nevertheless, each its own part."""
    clean = bench.save(bench.fresh(), NEW, bench.new)
    for rank in range(bench.ranks):
        own = bench.new.own_bytes(rank)
        if written(clean, rank) < own:
            raise LawError("gathered", f"rank {rank} of {bench.ranks} writes {written(clean, rank)} bytes of its {own}")
    for held in range(1, bench.ranks):
        ran = bench.save(bench.fresh(), NEW, bench.new, fault=Fault(held, "hold", names=("write",)))
        for rank in set(range(bench.ranks)) - {held}:
            if written(ran, rank) < bench.new.own_bytes(rank) and ran.was_hit:
                raise LawError("in_turn", f"{bench.ranks} ranks: rank {rank} does not write before rank {held} has")


def check_faults(bench: Bench) -> None:
    """Let each call of each rank fail once, as on a full disk: all raise. Then let it write half of what it should."""
    clean = bench.save(bench.fresh(), NEW, bench.new)
    for rank, index, name in points(clean, CAN_FAIL, bench.random):
        folder = bench.fresh()
        told = f"{_many(bench.ranks)}, call {index + 1} of rank {rank} ({name}) fails"
        ran = bench.save(folder, NEW, bench.new, fault=Fault(rank, "fail", index))
        _check_all_raised(ran, told)
        bench.check(folder, Run([], ran.events, [], True, []), told)
    for rank, index, name in points(clean, ("write",), bench.random):
        folder = bench.fresh()
        bench.save(folder, NEW, bench.new, fault=Fault(rank, "short", index))
        number, seen = bench.newest(folder, [(NEW, bench.new)])
        if number:
            told = f"{_many(bench.ranks)}, call {index + 1} of rank {rank} ({name}) writes half of its bytes"
            raise LawError("short_write", f"{told}: {seen}")


def _many(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _check_all_raised(ran: Run, told: str) -> None:
    if not ran.was_hit:
        return
    hows = [end.how if end else "waits" for end in ran.ends]
    if "raised" not in hows and "waits" not in hows:
        raise LawError("ignored", f"{told}, and save returns")
    if set(hows) != {"raised"}:
        words = {"waits": "waits for ever", "returned": "returns", "raised": "raises"}
        said = ", ".join(f"rank {rank} {words[how]}" for rank, how in enumerate(hows))
        raise LawError("alone", f"{told}: {said}")


def check_killed(bench: Bench) -> None:
    """Kill each rank before each of its calls while it is behind the others; while it is ahead, within writes, too."""
    for told, order in orders(bench.ranks):
        is_ahead = "ahead" in told
        number = order[0] if is_ahead else order[-1]
        clean = bench.save(bench.fresh(), NEW, bench.new, order)
        for rank, index, name in points(clean, (), bench.random):
            if rank == number:
                _kill(bench, order, Fault(rank, "kill", index), f"{told}, killed before its call {index + 1} ({name})")
                if is_ahead and name == "write":
                    fault, moment = Fault(rank, "torn", index), f"{told}, killed in its call {index + 1} ({name})"
                    _save_over(bench, _kill(bench, order, fault, moment), moment)
    if bench.ranks == 1:
        _kill_again(bench)


def _kill(bench: Bench, order: Sequence[int], fault: Fault, told: str) -> Path:
    """Kill, and look at the folder."""
    folder = bench.fresh()
    bench.check(folder, bench.save(folder, NEW, bench.new, order, fault), told)
    return folder


def _save_over(bench: Bench, folder: Path, told: str) -> None:
    """Save a smaller state of the same step over whatever was left."""
    ran = bench.save(folder, NEW, bench.small)
    raised = [str(end.value) for end in ran.ends if end and end.how == "raised"]
    if raised:
        raise LawError("leftover", f"{told}: the next save raises {raised[0]}")
    number, seen = bench.newest(folder, [(NEW, bench.small)])
    if number:
        clean = bench.fresh()
        bench.save(clean, NEW, bench.small)
        is_longer = _size(path_of(folder, NEW)) > _size(path_of(clean, NEW))
        raise LawError("not_truncated" if is_longer else "leftover", f"{told}: the next, smaller save: {seen}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _kill_again(bench: Bench) -> None:
    """Kill while a step is saved anew that is there already: one of the two is there afterwards."""
    base = bench.fresh()
    bench.save(base, NEW, bench.new)
    clean = bench.save(_copied(base), NEW, bench.again)
    for rank, index, name in points(clean, (), bench.random):
        folder = _copied(base)
        bench.save(folder, NEW, bench.again, fault=Fault(rank, "torn" if name == "write" else "kill", index))
        number, seen = bench.newest(folder, [(NEW, bench.new), (NEW, bench.again)])
        if number < 0:
            told = f"step {NEW} is saved anew, killed at call {index + 1} ({name})"
            raise LawError("lost", f"{told}: neither the one nor the other is there: {seen}")
        shutil.rmtree(folder)


def _copied(folder: Path) -> Path:
    copy = folder.with_name(f"{folder.name} copy")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return copy


def check_power(bench: Bench) -> None:
    """Take the power away after each call, in two orders."""
    files = {path.name: (path.stat().st_ino, path.read_bytes()) for path in bench.base.iterdir()}
    for order in (list(range(bench.ranks)), list(range(bench.ranks))[::-1]):
        made = _saved_in_place(bench, order)
        for left in losses(files, made.events, bench.ranks):
            folder = bench.folder / f"left {bench.made}"
            bench.made += 1
            folder.mkdir()
            for name, content in left.files.items():
                (folder / name).write_bytes(content)
            names = "and the new names are there" if left.has_names else "and names are as they were at the last sync"
            _check_left(bench, folder, left.returned, left.has_names, f"power lost after {left.last}, {names}")


def _saved_in_place(bench: Bench, order: Sequence[int]) -> Run:
    """Save in the base itself, whose inodes are known, and take the new file away."""
    before = {path.name for path in bench.base.iterdir()}
    ran = bench.save(bench.base, NEW, bench.new, order)
    for path in bench.base.iterdir():
        if path.name not in before:
            path.unlink()
    return ran


def _check_left(bench: Bench, folder: Path, returned: int, has_names: bool, told: str) -> None:
    number, seen = bench.newest(folder, [(NEW, bench.new), (OLD, bench.old)])
    if number and path_of(folder, NEW).exists():
        raise LawError("not_synced", f"{told}: step_{NEW}.ckpt is there, and is not whole")
    if number < 0:
        raise LawError("lost", f"{told}: {seen}")
    if number and returned:
        raise LawError("not_synced" if has_names else "folder_not_synced",
                       f"{told}: save had returned, and the new checkpoint is gone")  # fmt: skip


CHECKS: dict[str, Callable[[Bench], None]] = {
    "orders": check_orders,
    "at once": check_at_once,
    "faults": check_faults,
    "killed": check_killed,
    "power": check_power,
}


def main() -> None:
    """Run the law that a job file names."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text(encoding="utf-8"))
    forked.install()
    found: list[str] = []
    try:
        student = load_file(Path(job["file"]))
        CHECKS[job["law"]](Bench(student, Path(job["folder"]), job["ranks"], random.Random(job["seed"])))
    except LawError as wrong:
        found = [wrong.hint, re.sub(f"{re.escape(job['folder'])}/[^/']*/", "", wrong.shown)]
    path.with_suffix(".result").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
