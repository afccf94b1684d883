"""What a loss of power leaves of a folder, by the calls made before: the rules that lab 7 is judged by."""

from __future__ import annotations

import subprocess
import sys

from hpcllm.course.labs.checkpoint.disk import losses
from hpcllm.course.labs.checkpoint.forked import Call
from hpcllm.course.labs.checkpoint.scheduler import Event, Fault

OPEN = Event(0, Call("open", "/f/new"), inode=7)
WRITE = Event(0, Call("write", inode=7, data=b"abc"))
SYNC = Event(0, Call("sync", inode=7))
RENAME = Event(0, Call("rename", "/f/new", "/f/name"))
SYNC_FOLDER = Event(0, Call("sync", inode=1, is_folder=True))


def last(*events: Event) -> set[tuple[tuple[str, bytes], ...]]:
    """Folders that may be left after the last call."""
    before = list(losses({"name": (3, b"old")}, events[:-1], 1))
    found = list(losses({"name": (3, b"old")}, events, 1))
    assert len(found) >= len(before)
    return {tuple(sorted(left.files.items())) for left in found if left.returned}


def test_after_all_syncs_only_the_new_file_is_left():
    assert last(OPEN, WRITE, SYNC, RENAME, SYNC_FOLDER) == {(("name", b"abc"),)}


def test_a_rename_may_reach_the_disk_before_what_was_written():
    assert (("name", b"\0\0\0"),) in last(OPEN, WRITE, RENAME)


def test_a_rename_whose_folder_was_not_synced_may_be_lost():
    assert last(OPEN, WRITE, SYNC, RENAME) == {(("name", b"old"),), (("name", b"abc"),)}


def test_a_sync_reaches_what_its_rank_has_written():
    other = Event(1, Call("write", inode=7, offset=3, data=b"def"))
    assert last(OPEN, WRITE, other, SYNC, RENAME, SYNC_FOLDER) == {(("name", b"abc\0\0\0"),)}


def forked(size: int, work: str) -> str:
    """Run `work` on forked ranks, in a process without MPI: how each ended, and where it waited."""
    code = f"""
from hpcllm.course.lab import LawError
from hpcllm.course.labs.checkpoint.scheduler import run
try:
    ran = run({size}, lambda comm: {work})
    print([end and end.value for end in ran.ends], ran.waiting)
except LawError as wrong:
    print(wrong.hint)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_forked_ranks_meet_and_return():
    assert forked(3, "(comm.bcast(comm.rank + 5), comm.exscan(2), comm.allreduce(1))") == (
        "[(5, None, 3), (5, 2, 3), (5, 4, 3)] ['', '', '']"
    )


def test_a_rank_that_nobody_meets_waits_while_a_root_goes_on():
    assert forked(2, "comm.barrier() if comm.rank else comm.rank") == "[0, None] ['', 'barrier']"
    assert forked(2, "comm.rank if comm.rank else comm.bcast(7)") == "[7, 1] ['', '']"


def test_different_meetings_at_one_time_are_a_deadlock():
    assert forked(2, "comm.barrier() if comm.rank else comm.allgather(1)") == "deadlock"


def test_no_fault_is_none():
    assert not Fault(1, "kill", 3).hits(1, 2, WRITE.call)
    assert Fault(1, "kill", 3).hits(1, 3, WRITE.call)
