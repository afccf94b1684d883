#!/usr/bin/env python3
"""Delete each wait of hpcllm in turn: the tests on the pretended device, which see races, have to fail without it.

    python tests/mutants/waits.py --list                 the statements, found by their names in the source
    python tests/mutants/waits.py [--only TEXT] [--results FILE]     runs what FILE does not yet know; a line each

A statement is one call whose value nobody uses, `memory.before_send(data)`, and becomes `pass`. Each is judged by the
tests of its file, on 2 ranks, until one mode of the device finds it.
"""

from __future__ import annotations

import argparse
import ast
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.mutants.run import BROKEN, KILLED, Mutant, Tree

ROOT = Path(__file__).resolve().parents[2]
WAITS = {
    *("wait", "settle", "back", "synchronize", "record", "enter", "leave", "before_send", "before_receive", "finish"),
    *("record_stream", "used_here", "wait_all", "all", "Waitall", "_wait", "wait_sent", "wait_stream"),
    *("_forget_echo", "_finish"),
}
LINK, ARRAYS = "tests/pipeline/test_device_link.py", "tests/collectives/test_device_arrays.py"
ORDER = "tests/collectives/test_device_order.py"
TRAINING = "tests/training/test_train_on_device.py"
TESTS = {  # by file; those of a room are under its name
    "hpcllm/mpi/message_memory.py": (ORDER, LINK, ARRAYS),
    "hpcllm/pipeline": (LINK, TRAINING),
    "hpcllm/collectives": (ORDER, ARRAYS),
    "hpcllm/codecs/gpu": ("tests/training/test_device_damage.py",),
    "hpcllm/optim": (TRAINING,),
    "hpcllm/data/loader.py": ("tests/data/test_device_upload.py",),
    "hpcllm/checkpoint/background.py": (TRAINING,),
}
FILES = {
    "collectives": "worker nonblocking wire operations pairwise broadcasts grid legs ring two_step bruck doubling "
    "native",
    "codecs/gpu": "device_codecs",
    "optim": "weights buckets optimizer",
    "pipeline": "link",
    "mpi": "message_memory",
    "data": "loader",
    "checkpoint": "background",
}
RANKS = {"doubling": 3}  # where others than 2 are needed: of ranks that are no power of two
# what is no call alone: file, text, what it becomes
OTHERS = (
    ("hpcllm/collectives/worker.py", "        with stream:\n", "        if True:\n"),
    ("hpcllm/collectives/nonblocking.py", "True, lane), crossing, x)", "True, lane), crossing)"),
    ("hpcllm/mpi/message_memory.py", "        self.events.clear()  # an algorithm", "        pass  # an algorithm"),
    (
        "hpcllm/mpi/message_memory.py",
        "        self.events.clear()\n        self.echo = None\n",
        "        self.echo = None\n",
    ),
    ("hpcllm/mpi/message_memory.py", "            self.memory.echo = None\n", ""),
    (
        "hpcllm/mpi/message_memory.py",
        "        self.events.clear()\n        self.echo = None\n",
        "        self.events.clear()\n",
    ),
    ("hpcllm/mpi/message_memory.py", "                if not event.query():\n                    return False\n", ""),
    ("hpcllm/pipeline/link.py", " and self.memory.is_ready(message.data)", ""),
)
MODES = ("sealed", "open")
HANGS_S = 120.0  # a test that takes longer, as one that waits for a message that was never sent
PASSED = "passed"  # what is known of tests without a fault


def statements(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of the statements of a file that are calls of WAITS, on one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno):
            continue
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in WAITS:
            yield node.lineno, lines[node.lineno - 1]


def mutants(mode: str) -> Iterator[Mutant]:
    """A deletion of each wait; its text is the line with enough lines before it to occur once."""
    for room, names in FILES.items():
        for name in names.split():
            path = f"hpcllm/{room}/{name}.py"
            whole = (ROOT / path).read_text(encoding="utf-8")
            lines = whole.splitlines(keepends=True)
            for number, line in statements(ROOT / path):
                first = number - 1
                while whole.count("".join(lines[first:number])) > 1:
                    first -= 1
                gone = line[: len(line) - len(line.lstrip())] + "pass\n"
                replace = "".join(lines[first : number - 1]) + gone
                yield _mutant(mode, path, "".join(lines[first:number]), replace, f"{line.strip()} ({number})")
    for path, find, replace in OTHERS:
        yield _mutant(mode, path, find, replace, " ".join(f"{find} -> {replace or 'nothing'}".split()))


def _mutant(mode: str, path: str, find: str, replace: str, what: str) -> Mutant:
    room, _, file = path.removeprefix("hpcllm/").rpartition("/")
    tests, ranks = TESTS.get(path) or TESTS[f"hpcllm/{room}"], RANKS.get(file.removesuffix(".py"), 2)
    return Mutant(f"{path}: {what}", room, path, find, replace, f"{mode}:{ranks}", tests, "a race", limit_s=HANGS_S)


def judge(pair: tuple[Mutant, ...], tree: Tree, known: dict[str, str]) -> str:
    """Run the tests of both modes, until one finds it. known: results so far, of tests without a fault too.

    What the tests said of it at last is put beside it, as `NAME said`.
    """
    word = ""
    for mutant in pair:
        tests = f"{mutant.group} {' '.join(mutant.tests)}"
        if tests not in known:  # tests that fail without a fault, or cannot even start, find nothing
            broken = tree.verify(mutant)
            known[tests] = f"{broken.word}: {broken.told}" if broken else PASSED
        if known[tests] != PASSED:
            return known[tests]
        verdict = tree.judge(mutant)
        word, known[f"{mutant.name} said"] = verdict.word, f"{mutant.group}, {verdict.seconds:.0f} s: {verdict.told}"
        if word == KILLED:
            break
    return word


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the statements")
    parser.add_argument("--only", default="", metavar="TEXT[;TEXT...]", help="those whose file and statement have one")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the work tree to change and to test")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines: what is in it is not run again")
    arguments = parser.parse_args()
    known: dict[str, str] = {}
    if arguments.results and arguments.results.exists():
        known = dict(json.loads(line) for line in arguments.results.read_text().splitlines())
    only = arguments.only.split(";")
    pairs = [pair for pair in zip(*map(mutants, MODES), strict=True) if any(text in pair[0].name for text in only)]
    if arguments.list:
        print("\n".join(pair[0].name for pair in pairs))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the file is put back then, too
    tree = Tree(arguments.root.resolve())
    for pair in pairs:
        name = pair[0].name
        before = set(known)
        if name not in known:
            known[name] = judge(pair, tree, known)
        print(f"{known[name]:9} {name}", flush=True)
        if arguments.results:
            found = [new for new in known if new not in before and not known[new].startswith(BROKEN)]  # tried again
            with arguments.results.open("a") as file:
                file.writelines(json.dumps([new, known[new]]) + "\n" for new in found)
    score = [known[pair[0].name] for pair in pairs].count(KILLED)
    print(f"{score} of {len(pairs)} found")
    return 0 if score == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
