"""Sample the cases of parametrised tests: a pytest plugin that tests/run.sh loads (`-p sampling --sample LEVEL`).

    test_sum    ranks  algorithm  codec                 sample: each value of each parameter at least once; numbers of
                2      ring       raw     <- kept               ranks take turns from case to case of a file
                2      ring       int8                  fast: one case of each function, and of files whose
                3      two_step   int8    <- kept             tests start no process
                ...                                     without this plugin: all cases

Every test function keeps at least one case, on several ranks if it has any, but for those that a group of --all or
`@pytest.mark.full(reason="...")` leaves to `tests/run.sh --all`; with in_ci=True they are in the sample of groups that
HPCLLM_TESTS names too. Of cases that add equally many values, the one is kept whose number of ranks has cost its file
least so far: a file meets several numbers, small ones more. A case for every mode of the device runs in one of them, by
turns.

The choice depends on nothing but the names and values of the cases of a file: it is the same on all ranks, which would
wait for one another for ever otherwise, and stays when other files come and go.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

GROUPS = {  # serial+1: serial tests and those on one rank
    "fast": "serial",
    "sample": "serial+1 alone 2 3 4 sealed:serial sealed:2 open:2",
    "all": "serial+1 alone 2 3 4 5 late:3 "
    "sealed:serial sealed:1 sealed:2 sealed:3 sealed:4 open:1 open:2 open:3 open:4",
}
LATE = "late"  # a mode without a device, in which messages of tests on several ranks of these rooms use MPI's freedom
LATE_ROOMS = ("checkpoint", "collectives", "optim", "pipeline")
FAST_CASES = 1
SHARE_OF_EXAMPLES = {"fast": 10, "sample": 8}  # one in so many of the examples that a law asks hypothesis for
LEAST_EXAMPLES = 5
STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "os.exec"}  # events of Python's audit
refusing: list[pytest.Item] = []  # the test that must start no process now
RANKS = "_nprocs"  # mpi-pytest's parameter of tests for several numbers of ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", choices=[*GROUPS], default="all", help="how many cases of each test run")
    parser.addoption("--list-left", action="store_true", help="list what the sample leaves out, and run nothing")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full(reason, in_ci=False): left to tests/run.sh --all")
    if config.getoption("sample") == "fast":
        sys.addaudithook(refuse_processes)


def refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    # a run asks git for its commit; a skip from there would end pytest itself, by MPI_Abort
    if refusing and event in STARTS and arguments[:1] != ("git",):
        pytest.skip("starts a process, which --fast does not")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of this group are not even imported; in the fast sample, nor those that start processes."""
    if not is_tests(collection_path):
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_left_out = lacks(collection_path, text, os.environ.get("HPCLLM_TEST_GROUP", ""))
    is_fast = config.getoption("sample") == "fast"
    return True if is_left_out or (is_fast and starts_processes(text)) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """In the fast sample, a test that starts a process after all, by a helper or in what it tests, is skipped there."""
    if item.config.getoption("sample") != "fast":
        return (yield)
    refusing.append(item)
    try:
        return (yield)
    finally:
        refusing.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before tests of other groups go
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    level = config.getoption("sample")
    if config.getoption("list_left"):
        list_left(items, level)
        items.clear()
    elif level != "all":
        mode = os.environ.get("HPCLLM_PRETEND", "")
        kept = {item for item, group in sample(items, level).items() if group.rpartition(":")[0] == mode}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
        for item in items:
            ask_for_fewer_examples(item, SHARE_OF_EXAMPLES[level])
    yield


def sample(items: Sequence[pytest.Item], level: str) -> dict[pytest.Item, str]:
    """Items that `level` keeps, function by function, each with the group in which it runs."""
    groups = groups_at(level)
    ranks: defaultdict[Path, Counter[int]] = defaultdict(Counter)  # what cases of a file have cost, by their number
    turns: defaultdict[Path, Counter[str]] = defaultdict(Counter)  # that a group had of the cases of a file
    kept: dict[pytest.Item, str] = {}
    for cases in functions(items).values():
        path = cases[0].path
        candidates = [item for item in cases if not is_left(item, level)]
        candidates = [item for item in candidates if not set(groups_of(item)).isdisjoint(groups)]
        names = [item.nodeid for item in candidates]
        if level == "fast":
            chosen = spread(names, FAST_CASES)
        else:
            sizes = [ranks_of(item) for item in candidates]
            chosen = cover(numbered([to_cover(item) for item in candidates]), names, sizes, ranks[path])
        for item in (candidates[index] for index in chosen):
            allowed = (name for name in groups_of(item) if name in groups)
            kept[item] = min(allowed, key=turns[path].__getitem__)
            turns[path][kept[item]] += 1
    return kept


def is_left(item: pytest.Item, level: str) -> bool:
    """True for what is left to --all. Who names groups, as CI does, gets the sample that is for CI."""
    is_ci = level == "sample" and bool(os.environ.get("HPCLLM_TESTS"))
    return any(not (is_ci and marker.kwargs.get("in_ci", False)) for marker in item.iter_markers("full"))


def groups_at(level: str) -> list[str]:
    """Groups that run at a level, one by one: those of HPCLLM_TESTS, if it names any, else all of the level."""
    return (os.environ.get("HPCLLM_TESTS") or GROUPS[level]).replace("+", " ").split()


def functions(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Cases of each test function, by its name with the file's."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def list_left(items: Sequence[pytest.Item], level: str) -> None:
    """Print which groups and functions `level` leaves to --all, and of how many cases it runs how many."""
    kept = sample(items, level)
    print(f"groups left to --all: {', '.join(sorted({*groups_at('all')} - {*groups_at(level)}))}")
    print("cases that run, of all:")
    for group in groups_at("all"):
        runs, of_all = sum(name == group for name in kept.values()), sum(group in groups_of(item) for item in items)
        print(f"    {group:14} {runs:5} of {of_all:5}")
    print("functions left to --all:")
    whole = {name: cases for name, cases in functions(items).items() if not any(item in kept for item in cases)}
    for name, cases in whole.items():
        print(f"    {name}: {why_left(cases[0])}")
    print(f"{len(functions(items)) - len(whole)} of {len(functions(items))} functions run", end=", ")
    print(f"with {len(kept)} of {len(items)} cases")


def why_left(item: pytest.Item) -> str:
    marker = item.get_closest_marker("full")
    return str(marker.kwargs["reason"]) if marker else f"runs in group {' or '.join(groups_of(item))} only"


def groups_of(item: pytest.Item) -> list[str]:
    """Groups of tests/run.sh in which the test runs."""
    group = str(ranks_of(item) or ("alone" if item.get_closest_marker("alone") else "serial"))
    pretend = item.get_closest_marker("pretend")
    if pretend:
        return [f"{mode}:{group}" for mode in pretend.args or ("sealed", "open")]
    return [group, f"{LATE}:{group}"] if may_be_late(item) else [group]


def may_be_late(item: pytest.Item) -> bool:
    """True if the test runs in the mode LATE, too."""
    return ranks_of(item) > 1 and item.path.parent.name in LATE_ROOMS


def ranks_of(item: pytest.Item) -> int:
    """Number of ranks that the test runs on; 0: it is serial."""
    marker = item.get_closest_marker("parallel")
    if not marker:
        return 0
    ranks: Any = parameters(item).get(RANKS) or marker.args[0]
    return int(ranks[0] if isinstance(ranks, list) else ranks)


def parameters(item: pytest.Item) -> dict[str, object]:
    """Values of the test's parameters by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def to_cover(item: pytest.Item) -> dict[str, object]:
    """Parameters whose values the sample covers: of numbers of ranks, one that is more than one."""
    own = {name: value for name, value in parameters(item).items() if name != RANKS}
    return own | ({"several ranks": True} if ranks_of(item) > 1 else {})


def numbered(cases: Sequence[dict[str, object]]) -> list[frozenset[tuple[str, int]]]:
    """Values of each parameter as numbers in the order in which they appear, which no address of an object changes."""
    seen: defaultdict[str, dict[Hashable, int]] = defaultdict(dict)
    return [
        frozenset((name, seen[name].setdefault(key(value), len(seen[name]))) for name, value in case.items())
        for case in cases
    ]


def key(value: object) -> Hashable:
    """Something that only the same value has."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def cover(
    rows: Sequence[frozenset[tuple[str, int]]], names: Sequence[str], sizes: Sequence[int], used: Counter[int]
) -> list[int]:
    """Indices of few rows in which each value of each parameter stands; at least one, if there is any.

    sizes: number of ranks of each row; used: what each size has cost so far, counted on here: the square of it for each
    case, as more ranks take longer, and longer still where they share the cores.
    Greedy: the row with most values that are still missing comes next; of equal ones, one of the size that was used
    least. Rows are asked in an order that mixes them, for in the order of a grid whole columns would always go with the
    same partner.
    """
    missing = frozenset().union(*rows)
    order, chosen = mixed(names), list[int]()
    while missing or (rows and not chosen):
        best = max(order, key=lambda index: (len(rows[index] & missing), -used[sizes[index]]))
        chosen.append(best)
        missing -= rows[best]
        used[sizes[best]] += sizes[best] ** 2
    return sorted(chosen)


def spread(names: Sequence[str], count: int) -> list[int]:
    """Indices of `count` names, or of all if there are fewer."""
    return sorted(mixed(names)[:count])


def mixed(names: Sequence[str]) -> list[int]:
    """Indices in an order that only the names decide."""
    return sorted(range(len(names)), key=lambda index: (zlib.crc32(names[index].encode()), names[index]))


def ask_for_fewer_examples(item: pytest.Item, share: int) -> None:
    """Divide the number of hypothesis's examples, unless there are few."""
    test: Any = getattr(item, "obj", None)
    if not hypothesis.is_hypothesis_test(test) or hasattr(test, "all_examples"):  # each case has the same function
        return
    asked = test._hypothesis_internal_use_settings
    test.all_examples = asked.max_examples
    fewer = min(asked.max_examples, max(LEAST_EXAMPLES, asked.max_examples // share))
    test._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=fewer)


def is_tests(path: Path) -> bool:
    return path.name.startswith("test_") and path.suffix == ".py"


def lacks(path: Path, text: str, group: str) -> bool:
    """True if tests of a file with this text carry no marker that the group asks for, or lie in none of its rooms."""
    mode, _, ranks = group.rpartition(":")
    if mode == LATE and path.parent.name not in LATE_ROOMS:
        return True
    return (ranks.isdigit() and "parallel" not in text) or (mode not in ("", LATE) and "pretend" not in text)


def starts_processes(text: str) -> bool:
    """True if tests of a file with this text start processes, and not only by what they test."""
    return "subprocess" in text


if __name__ == "__main__":  # tests/run.sh asks for the groups of a level; without pytest this is quick
    print(GROUPS[sys.argv[1]])
