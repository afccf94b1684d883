"""What a training step asks of a device, counted on the pretended one of tests/pretend: at an old commit, and now.

    python perf/step_counts.py [--before 9c4b12a]

Three columns: the hpcllm of the commit `before`, today's by PyTorch's operators alone, and today's with kernels, which
are emulated (tests/emulated). All on today's pretended device, whose memory MPI cannot read; the layouts and the model
are those of tests/step_layouts.py, the third step is counted. Each count is that of the rank with most of it; moved
bytes are those of all tensors that operators are handed or make, of all ranks. Needs g++; the other commit comes from
git, into a folder that is removed again.

Writes step_counts.json and .md beside this file. One machine's counts are another's, but for waits for threads, and the
longest block where that is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LAUNCH = ["bash", str(ROOT / "jobscripts" / "local" / "mpirun.sh")]
BEFORE = "9c4b12a"
NOW, KERNELS = "today, operators", "today, kernels"
LIMIT_S = 900
QUANTITIES = {  # key in the file -> row of the table
    "launches": "launches",
    "event_waits": "streams' waits for events",
    "reads": "scalar reads by the host",
    "host_waits": "other waits of the host for the device",
    "copies": "copies between host and device",
    "copied_kb": "their kB",
    "moved_kb_a_token": "kB moved by operators, a token",
    "longest": "longest host block, launches",
    "longest_place": "its place",
    "denied": "launches that wait inside CUDA",
    "faults": "races and broken messages",
}


def count(layouts: dict[str, Any], tokens: int, first: int, emulate: bool) -> dict[str, Any]:
    """Count a step of each run on this rank, and gather. Collective over the world; the result is rank 0's."""
    import pretend

    pretend.start()
    pretend.watch()
    import small_runs
    from mpi4py import MPI

    from hpcllm.errors import ConfigError

    if emulate:
        from pretend.kernels import emulated_kernels
    opened = small_runs.open_run if hasattr(small_runs, "open_run") else small_runs.assemble  # today's, the older one
    found: dict[str, Any] = {}
    for layout, tables in layouts.items():
        try:
            config = small_runs.tiny(**tables)
        except ConfigError:  # an older one has no such key
            continue
        with emulated_kernels() if emulate else nullcontext(), opened(config, MPI.COMM_WORLD) as run:
            found[layout] = count_step(small_runs, run, tokens, first)
    return found


def count_step(small_runs: Any, run: Any, tokens: int, first: int) -> dict[str, Any]:
    """Count step `first` of an open run, and gather. Collective over the world; the result is rank 0's."""
    import pretend
    from mpi4py import MPI
    from pretend.counts import READ, THREAD, counting

    small_runs.run_steps(run, first)
    pretend.take_faults()
    with counting() as counts:
        small_runs.run_steps(run, 1, first=first)
    blocks = [block for block in counts.blocks if not block.in_lane]
    mine = {
        "launches": counts.launches,
        "event_waits": counts.event_waits,
        "reads": counts.times(READ),
        "host_waits": sum(block.times for block in blocks if block.name not in (READ, THREAD)),
        "copies": counts.to_device[0] + counts.to_host[0],
        "copied_kb": round((counts.to_device[1] + counts.to_host[1]) / 1e3, 1),
        "denied": sum(counts.denied().values()),
        "faults": len(pretend.take_faults()),
        "longest": blocks[0].longest,
        "longest_place": f"{blocks[0].name}, {blocks[0].place}",
    }
    ranks = MPI.COMM_WORLD.gather((mine, counts.moved_bytes))
    if not ranks:
        return {}
    most = max((rank for rank, _ in ranks), key=lambda rank: rank["longest"])
    moved = sum(moved for _, moved in ranks)
    most_of_all = {name: max(rank[name] for rank, _ in ranks) for name in mine}
    return most_of_all | {"longest_place": most["longest_place"], "moved_kb_a_token": round(moved / tokens / 1e3, 1)}


def work(asked: str, output: str) -> None:
    """Count in this rank what `counted` asks for."""
    found = count(**json.loads(asked))
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        Path(output).write_text(json.dumps(found))


def counted(tree: Path, ranks: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Start ranks with the hpcllm and the small runs of a tree; counts by layout, but for those that it has not."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pretend", "pretend_device-0.dist-info", "emulated"):
            (Path(folder) / name).symlink_to(ROOT / "tests" / name)
        output, paths = Path(folder) / "counts.json", (folder, tree / "tests", tree)
        environment = {**os.environ, "HPCLLM_PRETEND": "sealed", "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [*LAUNCH, str(ranks), sys.executable, str(HERE / "step_counts.py"), "--work", json.dumps(asked)]
        subprocess.run([*command, str(output)], env=environment, cwd=tree, check=True, timeout=LIMIT_S)
        return json.loads(output.read_text())


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Files of a commit, in a folder that is removed at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT)]
        packed = subprocess.run([*git, "archive", commit], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder)


def table(found: dict[str, dict[str, Any]], layouts: list[str]) -> Iterator[str]:
    for layout in layouts:
        yield from ("", f"### {layout}", "", f"| of a step | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}")
        for key, name in QUANTITIES.items():
            cells = [str(by_layout[layout][key]) if layout in by_layout else "" for by_layout in found.values()]
            yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help=f"commit of the first column (default: {BEFORE})")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from step_layouts import FIRST, LAYOUTS, TOKENS, tables_of

    found: dict[str, dict[str, Any]] = {}
    with tree_of(options.before) as before:
        for name, tree, emulate in (options.before, before, False), (NOW, ROOT, False), (KERNELS, ROOT, True):
            found[name] = {}
            for ranks in sorted({ranks for ranks, _ in LAYOUTS.values()}):
                layouts = {layout: tables_of(layout, False) for layout in LAYOUTS if LAYOUTS[layout][0] == ranks}
                asked = {"layouts": layouts, "tokens": TOKENS, "first": FIRST, "emulate": emulate}
                found[name] |= counted(tree, ranks, asked)
                print(name, ranks, "ranks", flush=True)
    (HERE / "step_counts.json").write_text(json.dumps(found, indent=1) + "\n")
    said = f"Made by step_counts.py, which says what is counted, in a step of {TOKENS} tokens."
    said += f" An empty cell: {options.before} has no such run."
    (HERE / "step_counts.md").write_text("\n".join((said, *table(found, list(LAYOUTS)), "")))


if __name__ == "__main__":
    main()
