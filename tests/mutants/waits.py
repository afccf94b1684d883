#!/usr/bin/env python3
"""Delete each wait of hpcllm in turn: the tests on the pretended device, which see races, have to fail without it.

    python tests/mutants/waits.py --list                 the deletions, found by their names in the source
    python tests/mutants/waits.py [--only TEXT[;TEXT...]] [--results FILE]     makes those that FILE does not know yet

A deletion is one of

    memory.before_send(data)                   a call whose value nobody uses                          becomes pass
    with self._up:                             a block that tells its work to another stream           becomes if True:
    landing.filled = recorded(device, ...)     the making of an event: one that never was recorded, which orders nothing
    OTHERS                                     what has neither form

Tests of its file are run one stage after another, the quickest first, in both modes of the device, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.mutants.run import BROKEN, KILLED, SURVIVED, Mutant, Tree

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    *("wait", "settle", "back", "synchronize", "record", "enter", "leave", "before_send", "before_receive", "finish"),
    *("record_stream", "used_here", "wait_all", "all", "Waitall", "_wait", "wait_sent", "wait_stream", "wait_event"),
    *("_forget_echo", "_finish", "wait_received"),
}
STREAMS = {"stream", "self._up", "self._down", "self._out", "self._back", "self._stream"}
MODES = ("sealed", "open")
Place = tuple[int, int]  # line, and column


@dataclass(frozen=True)
class Stage:
    """Tests that judge together: in each mode one start of pytest."""

    tests: str
    select: str = ""  # of pytest's -k
    ranks: str = "2"  # or serial
    modes: tuple[str, ...] = MODES  # none: without the pretended device
    limit_s: float = 60.0  # a test that takes longer hangs, as one that waits for a message that was never sent


ORDER = Stage("tests/collectives/test_device_order.py")
ORDER_3 = Stage(ORDER.tests, ranks="3")
SEGMENTS = Stage("tests/collectives/test_device_arrays.py", "several_segments", "3", limit_s=120)
LINK = Stage("tests/pipeline/test_device_link.py")
STREAM = Stage("tests/training/test_train_on_device.py", "not_the_default_one")
TRAINING = Stage("tests/training/test_train_on_device.py", "losses_are_those", limit_s=240)
CHECKPOINTS = Stage("tests/training/test_train_on_device.py", "goes_from_the_cpu", limit_s=240)
OWN_STREAMS = Stage("tests/training/test_offload.py", "of_their_own", ranks="1")
FEW_OFFLOAD = Stage("tests/training/test_offload.py", "bits_are_those and (selective or full)", limit_s=120)
OFFLOAD = Stage("tests/training/test_offload.py", "bits_are_those", limit_s=120)
GOES_ON = Stage("tests/training/test_offload.py", "goes_on", limit_s=120)
LOOKED_AT = Stage("tests/optim/test_order_on_device.py", limit_s=120)
ZERO3 = Stage("tests/optim/test_zero3_on_device.py", modes=("open",))
MEASURED = Stage("tests/training/test_train.py", "nothing_is_measured", modes=())
TEXTS = Stage("tests/finetuning/test_grpo.py", modes=(), limit_s=120)
SAVED = Stage("tests/training/test_train.py", "no_number or signal_to_one_rank", modes=(), limit_s=120)
OWN_STREAM = Stage("tests/system/test_device.py", "stream_of_its_own or any_stream", ranks="1")
UPLOAD = Stage("tests/data/test_device_upload.py")
DAMAGE = Stage("tests/training/test_device_damage.py", ranks="1")
DECODED = Stage(ORDER.tests, "decoded_as_they_are", ranks="1")
COPY = Stage("tests/checkpoint/test_background.py", ranks="1")
EXCHANGE = Stage("tests/checkpoint/test_exchange.py", "random_splits or handed_over or under_way", modes=("late",))
GRID = Stage("tests/collectives/test_device_arrays.py", "bits_are_those and allreduce", "4", limit_s=120)
TRAVEL = Stage("tests/optim/test_zero3_on_device.py", "travel")
HIDDEN = Stage("tests/optim/test_buckets.py", "count_as_hidden", modes=())
AT_HOME = Stage("tests/training/test_offload.py", "at_home", ranks="1")
STAGES = {  # by file, or by room; the quickest first
    "hpcllm/mpi/message_memory.py": (DECODED, ORDER, LINK, SEGMENTS),
    "hpcllm/pipeline/link.py": (LINK, TRAINING),
    "hpcllm/pipeline/host_activations.py": (OWN_STREAMS, FEW_OFFLOAD, GOES_ON, OFFLOAD),
    "hpcllm/collectives": (ORDER, ORDER_3, SEGMENTS, GRID),
    "hpcllm/codecs/gpu": (DAMAGE,),
    "hpcllm/optim": (LOOKED_AT, CHECKPOINTS),
    "hpcllm/optim/buckets.py": (HIDDEN, LOOKED_AT, CHECKPOINTS),
    "hpcllm/optim/optimizer.py": (AT_HOME, LOOKED_AT, CHECKPOINTS),
    "hpcllm/optim/weights.py": (TRAVEL, LOOKED_AT, ZERO3, CHECKPOINTS),
    "hpcllm/optim/host_states.py": (FEW_OFFLOAD, GOES_ON, OFFLOAD),
    "hpcllm/data/loader.py": (UPLOAD,),
    "hpcllm/checkpoint/background.py": (COPY, CHECKPOINTS),
    "hpcllm/checkpoint/exchange.py": (EXCHANGE,),
    "hpcllm/finetuning": (TEXTS,),
    "hpcllm/system": (OWN_STREAM, STREAM),
    "hpcllm/training": (LOOKED_AT, CHECKPOINTS),
    "hpcllm/training/loop.py": (SAVED, MEASURED, LOOKED_AT, CHECKPOINTS),
}
FILES = {
    "mpi": "message_memory",
    "pipeline": "link host_activations",
    "collectives": "worker nonblocking wire operations pairwise broadcasts grid legs ring two_step bruck doubling "
    "native",
    "optim": "host_states weights buckets optimizer",
    "data": "loader",
    "checkpoint": "background exchange",
    "system": "device",
    "training": "loop step",
    "finetuning": "rollouts",
    "codecs/gpu": "device_codecs",
}
# what has no such form: file, text, what it becomes
OTHERS = (
    ("hpcllm/collectives/nonblocking.py", "True, lane), crossing, x)", "True, lane), crossing)"),
    ("hpcllm/mpi/message_memory.py", "        self.events.clear()  # the memory", "        pass  # the memory"),
    ("hpcllm/mpi/message_memory.py", "            self.memory.echo = None\n", ""),
    ("hpcllm/mpi/message_memory.py", "                if not event.query():\n                    return False\n", ""),
    ("hpcllm/pipeline/link.py", " and self.memory.is_ready(message.data)", ""),
)


@dataclass(frozen=True)
class Deletion:
    """file: from the root of the repository; find occurs there once; what: the function and the statement."""

    file: str
    find: str
    replace: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.what}"

    def mutants(self) -> Iterator[Mutant]:
        """The deletion with each selection of tests that judges it, in their order."""
        room = self.file.removeprefix("hpcllm/").rpartition("/")[0]
        for stage in STAGES.get(self.file) or STAGES[f"hpcllm/{room}"]:
            for group in [f"{mode}:{stage.ranks}" for mode in stage.modes] or [stage.ranks]:
                yield Mutant(
                    self.name, room, self.file, self.find, self.replace, group, (stage.tests,), "a race",
                    select=stage.select, limit_s=stage.limit_s,
                )  # fmt: skip


def deletions() -> Iterator[Deletion]:
    for room, names in FILES.items():
        for name in names.split():
            yield from of_file(f"hpcllm/{room}/{name}.py")
    for path, find, replace in OTHERS:
        yield Deletion(path, find, replace, " ".join(f"{find} -> {replace or 'nothing'}".split()))


def of_file(path: str) -> Iterator[Deletion]:
    """The deletions of a file; the text to find is that of its lines, with enough lines before to occur once."""
    whole = (ROOT / path).read_text(encoding="utf-8")
    lines, tree, seen = whole.splitlines(keepends=True), ast.parse(whole), Counter[str]()
    for node in ast.walk(tree):
        for begin, end, replace in edits(node, whole):
            first, last = begin[0] - 1, end[0]
            start = first
            while whole.count("".join(lines[start:last])) > 1:
                start -= 1
            kept = "".join(lines[start:first]) + lines[first][: begin[1]], lines[last - 1][end[1] :]
            what = f"{around(tree, last)}: {lines[first].strip().partition('  #')[0]}"
            seen[what] += 1
            what += f" ({seen[what]})" if seen[what] > 1 else ""
            yield Deletion(path, "".join(lines[start:last]), replace.join(kept), what)


def around(tree: ast.Module, line: int) -> str:
    """The function and class in which a line is: `Slots.wait`."""
    kinds = ast.FunctionDef, ast.ClassDef
    found = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return ".".join(node.name for node in sorted(found, key=lambda node: node.lineno))


def edits(node: ast.AST, whole: str) -> Iterator[tuple[Place, Place, str]]:
    """Where what is replaced of a node begins and ends, and by what it is."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value) in CALLS:
        yield *span(node.value, node.value), "pass"
    if isinstance(node, ast.With) and ast.unparse(node.items[0]) in STREAMS:
        yield *span(node, node.items[0].context_expr), "if True"
    if isinstance(node, ast.Call) and name_of(node) == "recorded":
        yield *span(node, node), f"torch.Event({ast.get_source_segment(whole, node.args[0])}, enable_timing=False)"
    if isinstance(node, ast.Call) and name_of(node) == "_recorded" and node.args:
        yield *span(node, node), "None"


def span(first: ast.expr | ast.stmt, last: ast.expr) -> tuple[Place, Place]:
    """Where a node begins, and where another ends."""
    assert last.end_lineno
    assert last.end_col_offset is not None
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def judge(deletion: Deletion, tree: Tree, sound: dict[tuple[str, tuple[str, ...], str], str]) -> dict[str, object]:
    """Run one selection of tests after another, until one finds it; returns what is kept of it.

    sound: what is known of selections without a fault, empty where they pass; those that fail find nothing.
    """
    seconds = 0.0
    for mutant in deletion.mutants():
        if mutant.selection not in sound:
            broken = tree.verify(mutant)
            sound[mutant.selection] = in_a_line(broken.told) if broken else ""
            print(
                f"          {mutant.group} {mutant.tests[0]} -k {mutant.select!r}: {sound[mutant.selection] or 'sound'}"
            )
        if said := sound[mutant.selection]:
            return kept(deletion, BROKEN, mutant.group, seconds, said)
        verdict = tree.judge(mutant)
        seconds += verdict.seconds
        if verdict.word != SURVIVED:
            said = in_a_line(verdict.told)
            word = verdict.word if said else BROKEN
            return kept(deletion, word, mutant.group, seconds, said or "ended without a word")
    return kept(deletion, SURVIVED, "", seconds, "")


def kept(deletion: Deletion, word: str, group: str, seconds: float, said: str) -> dict[str, object]:
    """What is kept of a deletion. group: by which it was found; seconds: of all tests that judged it."""
    return {"statement": deletion.name, "word": word, "group": group, "seconds": round(seconds), "said": said}


def in_a_line(told: str) -> str:
    """The test that failed and the first lines of its complaint; or where it hung or died of freed memory.

    Nothing if no test complains: the job was ended from outside.
    """
    told = re.sub(r"/\S*/((?:hpcllm|tests)/)", r"\1", told)
    if died := re.search(r"Fatal Python error: ([\w ]+)", told):
        return f"{died[1]}, at {frames(told.partition('Current thread')[2].partition('Extension modules')[0])}"
    if "+++ Timeout +++" in told:
        inner_last = frames(told.partition("Stack of MainThread")[2].partition("~~~ ")[0], last_first=True)
        return f"hangs, at {inner_last}"
    test = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py::\S+)|(test_\w+\.py::\S+) failed here", told, re.M)
    name = next(filter(None, test.groups())) if test else ""
    faults = re.findall(r"^E   +(?:(?:AssertionError|Failed): )?(\S.*)", told, re.M)
    return f"{name}: {'; '.join(faults[:3])}"[:300] if name else ""


def frames(stack: str, last_first: bool = False) -> str:
    """The three innermost functions of a stack that are hpcllm's."""
    found = re.findall(r'File "(hpcllm/\S+)", line (\d+),? in (\w+)', stack)
    return " < ".join(
        f"{file}:{line} {function}" for file, line, function in (found[::-1] if last_first else found)[:3]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the deletions")
    parser.add_argument("--only", default="", metavar="TEXT[;TEXT...]", help="those whose file and statement have one")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the work tree to change and to test")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines: what is in it is not run again")
    arguments = parser.parse_args()
    texts = arguments.only.split(";")
    chosen = [one for one in deletions() if any(text in one.name for text in texts)]
    if arguments.list:
        print("\n".join(one.name for one in chosen))
        return 0
    known: dict[str, str] = {}
    if arguments.results and arguments.results.exists():
        records = [json.loads(line) for line in arguments.results.read_text().splitlines()]
        known = {record["statement"]: record["word"] for record in records}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the file is put back then, too
    tree, sound = Tree(arguments.root.resolve()), dict[tuple[str, tuple[str, ...], str], str]()
    for one in chosen:
        if one.name in known:
            continue
        record = judge(one, tree, sound)
        known[one.name] = str(record["word"])
        print(f"{record['word']:9} {record['seconds']:4} s  {one.name}\n          {record['said']}", flush=True)
        if arguments.results and record["word"] in (KILLED, SURVIVED):  # others are tried again
            with arguments.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
    score = [known[one.name] for one in chosen].count(KILLED)
    print(f"{score} of {len(chosen)} found")
    return 0 if score == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
