"""Hostile command lines in numbers, each in a process of its own: does any end in a traceback, hang, or a wrong code?

    python perf/hostile_inputs.py [--count 3000] [--seed 0] [--limit 10] [--resume]

A server imports hpcllm once and forks for each case, in a fresh folder of tests/hostile.py; a case has `limit` seconds
and 8 GiB of address space; one that takes longer is run once more before it counts, for the machine may be shared.
What is wrong with an answer is said by tests/hostile.py. The counts go to hostile_inputs.json beside this file, from
where --resume goes on; exit code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import command_lines, fault, make  # noqa: E402

import hpcllm.checkpoint.huggingface.start  # noqa: E402 (heavy: before the forks)
import hpcllm.cli.main  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
HEAVY = """inference.generate checkpoint.huggingface.convert checkpoint.archive checkpoint.diff plan.layout_search
plan.report plan.explain plan.ranking perf.__main__ report.page"""
MEMORY_BYTES = 8 << 30
MOST_SHOWN = 300  # characters of a word in a report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=10.0, metavar="S")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    known: dict[str, Any] = {
        "seed": arguments.seed,
        "cases": 0,
        "codes": {},
        "repeated": 0,
        "longest_s": 0.0,
        "faults": [],
    }
    if arguments.resume and RESULTS.exists():
        known = json.loads(RESULTS.read_text())
    for name in (*hpcllm.cli.main.COMMANDS, *HEAVY.split()):  # before the forks
        with contextlib.suppress(ImportError):
            importlib.import_module(f"hpcllm.{name}" if "." in name else f"hpcllm.cli.{name}")
    codes = Counter(known["codes"])
    cases = islice(command_lines(known["seed"]), known["cases"], arguments.count)
    for words, files in cases:
        code, took_s, output, errors = run(words, files, arguments.limit)
        if code is None:
            known["repeated"] += 1
            code, took_s, output, errors = run(words, files, arguments.limit)
        wrong = fault(code, output, errors) if code is not None else f"over {arguments.limit:g} s"
        if wrong:
            told = [word[:MOST_SHOWN] for word in words]
            known["faults"].append({"words": told, "files": files, "fault": wrong, "errors": errors[-1500:]})
            print(f"{wrong}: {' '.join(told)}", flush=True)
        codes[str(code)] += 1
        known |= {"cases": known["cases"] + 1, "codes": dict(codes), "longest_s": max(known["longest_s"], took_s)}
        if known["cases"] % 20 == 0 or wrong:
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{known['cases']} cases, codes {known['codes']}, {len(known['faults'])} faults")
    return 1 if known["faults"] else 0


def run(words: list[str], files: dict[str, str], limit_s: float) -> tuple[int | None, float, str, str]:
    """Run one command line in a fork; exit code (None: killed at the limit), seconds, output, errors."""
    folder = Path(tempfile.mkdtemp(prefix="hostile inputs "))
    make(folder)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    started_s = time.monotonic()
    process = os.fork()
    if process == 0:
        _child(words, folder)
    code = _wait(process, limit_s)
    took_s = time.monotonic() - started_s
    output, errors = ((folder / f".{name}").read_bytes().decode(errors="replace") for name in ("out", "err"))
    shutil.rmtree(folder, ignore_errors=True)
    return code, took_s, output, errors


def _child(words: list[str], folder: Path) -> None:
    code: Any = 99
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        code = hpcllm.cli.main.main(words)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _wait(process: int, limit_s: float) -> int | None:
    handle = os.pidfd_open(process)
    try:
        if not select.select([handle], [], [], limit_s)[0]:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
