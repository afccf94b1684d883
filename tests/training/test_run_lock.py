"""One job at a time in a run folder: the second is kept out, or, on a system without locks, the first notices."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcllm.errors import ConfigError, HpcllmError
from hpcllm.training.run_lock import NO_LOCKS, RunLock, lock_run

ROOT = Path(__file__).parents[2]


def taken(folder: Path, restart: bool = False) -> RunLock:
    lock = RunLock(folder)
    lock.take(restart)
    return lock


@pytest.mark.parametrize("restart", [False, True])
def test_a_second_job_is_rejected_and_the_first_goes_on(tmp_path, restart):
    first = taken(tmp_path / "a run")
    with pytest.raises(ConfigError, match=rf"another job \(.*process {os.getpid()} on .*a run"):
        taken(tmp_path / "a run", restart)
    first.check()
    first.release()
    taken(tmp_path / "a run", restart).release()
    assert len(list(tmp_path.glob("a run.before-*"))) == restart


def test_a_killed_job_keeps_nobody_out(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from hpcllm.training.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.take(False); print('taken', flush=True); time.sleep(60)"
    )
    environment = {"PYTHONPATH": str(ROOT)} | os.environ
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "r"], stdout=subprocess.PIPE, env=environment
    ) as job:
        assert job.stdout.readline() == b"taken\n"
        with pytest.raises(ConfigError, match=f"process {job.pid} "):
            taken(tmp_path / "r")
        job.send_signal(signal.SIGKILL)
        job.wait()
        taken(tmp_path / "r").release()


@pytest.mark.parametrize("number", NO_LOCKS)
@pytest.mark.parametrize("restart", [False, True])
def test_without_locks_the_later_job_wins_and_the_earlier_one_ends(tmp_path, monkeypatch, number, restart):
    def no_lock(_file, _how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    first = taken(tmp_path / "r")
    first.check()
    second = taken(tmp_path / "r", restart)
    second.check()
    with pytest.raises(HpcllmError, match=r"another job .* has taken over"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_other_failures_to_lock_are_not_taken_for_a_system_without_locks(tmp_path, monkeypatch):
    def broken(_file, _how):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(ConfigError, match="Input/output error"):
        taken(tmp_path / "r")


def test_a_folder_that_went_away_is_said(tmp_path):
    lock = taken(tmp_path / "r")
    (tmp_path / "r").rename(tmp_path / "moved")
    with pytest.raises(HpcllmError, match="gone from under this job"):
        lock.check()
    lock.release()


@pytest.mark.parallel([1, 2, 3])
def test_all_ranks_are_rejected_with_the_same_words(comm, shared_path):
    with lock_run(comm, shared_path / "r", False):
        with pytest.raises(ConfigError, match="another job") as rejected, lock_run(comm, shared_path / "r", True):
            pass
        assert len(set(comm.allgather(str(rejected.value)))) == 1
    with lock_run(comm, shared_path / "r", False):
        comm.Barrier()
