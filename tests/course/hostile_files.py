"""Files of lab 1 that do what no solution does, each with the hints of which one has to come.

The right file, but that `one_way`, or the file while it is loaded, does this; in `ranks_of` the folder of the check is
the working directory, and four processes run the file at once.
"""

from __future__ import annotations

from pathlib import Path

RIGHT = (Path(__file__).parents[2] / "course/latency/right/plain.py").read_text(encoding="utf-8")


def in_function(code: str) -> bytes:
    """Return the right file, but that one_way does this first."""
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    return f"{RIGHT}\nright_one_way = one_way\n\n\ndef one_way(comm, size_bytes, rounds):\n{body}\n    return right_one_way(comm, size_bytes, rounds)\n".encode()  # noqa: E501 -- a program


def at_load(code: str) -> bytes:
    """Return the right file, which does this while it is loaded."""
    return f"{RIGHT}\n{code}\n".encode()


FORK_BOMB = """
import subprocess, sys
bomb = "import subprocess, sys; n = int(sys.argv[1])\\n"
bomb += "while True: n < 4 and [subprocess.Popen([sys.executable, '-c', sys.argv[2], str(n + 1), sys.argv[2]]) for _ in '123'];"
bomb += "import time; time.sleep(1000)"
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", bomb.replace("while True", "if True"), "0", bomb.replace("while True", "if True")],
                     start_new_session=True)
while True: pass
"""  # noqa: E501 -- a program
PATCHED_GRADER = """
import sys
sys.modules["hpcllm.course.labs.latency.checks"].check_counts = lambda *_: None
"""
CHILD_AS_RANK = """
import os
if os.fork() == 0:
    pass
"""
ABORTS = "comm.Abort(0)"
SEED = """
import json
seed = json.load(open("job.json"))["seed"]
"""
CIRCLE = """
if comm.size == 1: return 0.0
comm.Ssend(bytearray(1), dest=(comm.rank + 1) % comm.size)
"""
C_CALL = """
import itertools
if comm.size > 1: sum(itertools.repeat(0))
"""
THREADS = """
import threading, time
for _ in range(2): threading.Thread(target=time.sleep, args=(1000,)).start()
"""
TEN_GIGABYTES = """
import numpy as np
x = np.ones(10 << 27)
"""
FOLDER_GONE = """
import os, shutil
shutil.rmtree(os.getcwd(), ignore_errors=True)
import time; time.sleep(100)
"""
EVIL_ERROR = """
class Evil(BaseException):
    def __str__(self): raise SystemExit(0)
raise Evil
"""
IGNORES_SIGNALS = """
import signal
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
while True: pass
"""
ERROR_HANDLER = """
if comm.size == 1: return 0.0
from mpi4py import MPI
for each in (MPI.COMM_WORLD, comm): each.Set_errhandler(MPI.ERRORS_ARE_FATAL)
comm.Send(bytearray(1), dest=99)
"""
HOSTILE: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "endless at import": (at_load("while True: pass"), ("endless",)),
    "endless in a C call": (in_function(C_CALL), ("endless",)),
    "os._exit": (in_function("import os; os._exit(0)"), ("crash",)),
    "os._exit of one rank": (in_function("import os; comm.rank == 1 and os._exit(0)"), ("crash",)),
    "sys.exit": (in_function("import sys; sys.exit()"), ("exception",)),
    "sys.exit at import": (at_load("import sys; sys.exit(0)"), ("exception",)),
    "kill -9": (in_function("import os; os.kill(os.getpid(), 9)"), ("crash",)),
    "kill -9 of one rank": (in_function("import os; comm.rank == 1 and os.kill(os.getpid(), 9)"), ("crash",)),
    "kill -STOP": (in_function("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"), ("stopped",)),
    "ignores signals": (in_function(IGNORES_SIGNALS), ("endless",)),
    "wrong address": (in_function("import ctypes; ctypes.string_at(0)"), ("crash",)),
    "fork": (in_function(CHILD_AS_RANK), ("",)),
    "fork bomb": (in_function(FORK_BOMB), ("endless",)),
    "10 GB": (in_function(TEN_GIGABYTES), ("memory",)),
    "prints for ever": (in_function("while True: print('x' * 10_000)"), ("endless",)),
    "removes the folder": (in_function(FOLDER_GONE), ("files",)),
    "blocking sends in a circle": (in_function(CIRCLE), ("deadlock",)),
    "exception on one rank": (in_function("if comm.rank == comm.size - 1: {}['mine']"), ("exception",)),
    "own exception": (in_function(EVIL_ERROR), ("exception", "crash")),
    "patched clock": (at_load("time.perf_counter = lambda: 0.0"), ("tampered",)),
    "patched grader": (at_load(PATCHED_GRADER), ("tampered",)),
    "patched communicator": (in_function("type(comm).count = lambda *_: None"), ("tampered",)),
    "patched Python": (at_load("import builtins; builtins.max = min"), ("tampered",)),
    "threads left": (in_function(THREADS), ("",)),
    "reads the seed": (in_function(SEED), ("exception",)),
    "error handler": (in_function(ERROR_HANDLER), ("crash", "world")),
    "Finalize": (in_function("from mpi4py import MPI; MPI.Finalize()"), ("not_yours",)),
    "Abort": (in_function(ABORTS), ("not_yours",)),
    "Abort of the world": (in_function("from mpi4py import MPI; MPI.COMM_WORLD.Abort(0)"), ("crash", "world")),
    "Free": (in_function("comm.Free()"), ("not_yours",)),
    "closes files": (in_function("import os; os.closerange(3, 1000)"), ("crash", "exception")),
    "borrowed": (b"from hpcllm.course.labs.latency.checks import fit, one_way, predict_allreduce", ("borrowed",)),
    "no UTF-8": (b"\xff\xfe\x00" + at_load(""), ("exception",)),
    "zero bytes": (b"\0" * 1000, ("exception",)),
    "empty": (b"", ("missing",)),
    "huge prediction": (at_load("PREDICTIONS = {'half': 10**400}"), ("exception",)),
    "deep recursion": (in_function("return one_way(comm, size_bytes, rounds)"), ("exception",)),
}  # fmt: skip
