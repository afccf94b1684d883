"""A trace says what each rank did and when, on one clock, in a file that viewers open."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi4py import MPI

from hpcllm.config.schema import MeshConfig
from hpcllm.errors import HpcllmError
from hpcllm.mpi import clock_sync as clocks
from hpcllm.mpi.mesh import open_mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.measured import FIRST_ID, read_trace
from hpcllm.pipeline.schedules import Schedule, make_schedule
from hpcllm.pipeline.trace import recording, write_trace

STEP = 12
LAYOUTS = {1: (1,), 2: (1, 2), 3: (1, 3), 4: (1, 2, 4)}  # ranks -> pp


def made_up(schedule: Schedule, rank: int) -> list[tuple[str, str, float, float]]:
    """One rank's actions, a millisecond each, with a wait before each backward pass."""
    now, spans = time.perf_counter(), []
    for number, action in enumerate(schedule.work()[rank]):
        start = now + 2e-3 * number
        if str(action).startswith("B"):
            spans.append(("wait", f"RECV_{action}", start - 1e-3, start))
        spans.append(("compute", str(action), start, start + 1e-3))
    return spans


def meet(comm) -> float:
    comm.Barrier()
    return time.perf_counter()


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_trace_reads_back_as_what_was_recorded(comm, shared_path):
    for pp in LAYOUTS[comm.size]:
        schedule, folder = make_schedule("1f1b", pp, 5), shared_path / f"{pp} stages"
        with open_mesh(comm, MeshConfig(pp=pp)) as mesh:
            spans = made_up(schedule, mesh.pp.rank)
            path = write_trace(folder, STEP, schedule, mesh, spans, Waits(30.0))
            comm.Barrier()
            mine = read_trace(path)[mesh.dp.rank]
            assert (path.name, mine.step, mine.schedule) == ("step_00000012.json", STEP, schedule)
            assert [path.name] == [entry.name for entry in folder.iterdir()]
            durations = [end - start for _, start, end in mine.rows[mesh.pp.rank]]
            assert durations == pytest.approx([1e-3] * len(durations), abs=1e-8)
            waits = [what for what, _, _ in mine.waits[mesh.pp.rank]]
            assert waits == [what for kind, what, _, _ in spans if kind == "wait"]


@pytest.mark.parallel([2, 3, 4])
def test_all_ranks_times_are_on_one_clock(comm, shared_path, monkeypatch):
    """Ranks whose clocks are hours apart do the same at the same time; the file says so to within its error."""
    skew_s = 3600.0 * comm.rank
    measure_offset = clocks.measure_offset
    monkeypatch.setattr(
        "hpcllm.pipeline.trace.measure_offset",
        lambda comm, waits: measure_offset(comm, waits, lambda: time.perf_counter() + skew_s),
    )
    schedule = make_schedule("gpipe", comm.size, 1)
    start = comm.bcast(meet(comm))
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        spans = [
            ("compute", str(action), start + number + skew_s, start + number + 0.5 + skew_s)
            for number, action in enumerate(schedule.work()[mesh.pp.rank])
        ]
        path = write_trace(shared_path, STEP, schedule, mesh, spans, Waits(30.0))
    comm.Barrier()
    data = json.loads(path.read_text())
    starts = [event["ts"] for event in data["traceEvents"] if event["ph"] == "X" and event["name"] == "F0"]
    assert len(starts) == comm.size
    assert max(starts) - min(starts) <= 2 * data["otherData"]["clock_error_us"] + 0.01
    assert data["otherData"]["clock_error_us"] < 1e5


@pytest.mark.parallel([1, 2, 4])
def test_a_viewer_finds_a_named_track_a_rank(comm, shared_path):
    pp = max(1, comm.size // 2)
    schedule = make_schedule("1f1b", pp, 2)
    with open_mesh(comm, MeshConfig(pp=pp)) as mesh:
        path = write_trace(shared_path, STEP, schedule, mesh, made_up(schedule, mesh.pp.rank), Waits(30.0))
        places = comm.allgather((FIRST_ID + mesh.dp.rank, FIRST_ID + mesh.pp.rank))
    comm.Barrier()
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names) == sorted(places)
    assert all(name == f"rank {tid - FIRST_ID}" for (_, tid), name in names.items())
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert {(event["pid"], event["tid"]) for event in events} == set(places)


@pytest.mark.parallel([1, 2, 3])
def test_a_file_that_cannot_be_written_is_said_by_all_and_leaves_no_message_behind(comm, shared_path):
    schedule = make_schedule("gpipe", comm.size, 400)
    (shared_path / "taken").write_text("")
    with open_mesh(comm, MeshConfig(pp=comm.size)) as mesh:
        spans = made_up(schedule, mesh.pp.rank)
        with pytest.raises(HpcllmError, match=r"cannot write .*step_00000012\.json"):
            write_trace(shared_path / "taken", STEP, schedule, mesh, spans, Waits(30.0))
        assert not mesh.world.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


@dataclass
class Recorded:
    """What an engine has to have."""

    record: object = None


def test_an_engine_is_recorded_only_while_it_is_wanted():
    for wanted in (False, True):
        engine = Recorded()
        with recording(engine, wanted) as spans:
            assert (engine.record is not None) == wanted
            if wanted:
                engine.record("compute", "F0", 1.0, 2.0)
        assert engine.record is None
        assert spans == [("compute", "F0", 1.0, 2.0)] * wanted


def test_an_engine_that_fails_is_not_recorded_any_more():
    engine = Recorded()
    with contextlib.suppress(ValueError), recording(engine, True):
        raise ValueError
    assert engine.record is None


def test_recording_costs_microseconds_an_action():
    engine = Recorded()
    with recording(engine, True) as spans:
        start = time.perf_counter()
        for _ in range(10_000):
            engine.record("compute", "F0", 1.0, 2.0)
        assert time.perf_counter() - start < 10_000 * 20e-6
    assert len(spans) == 10_000


def test_names_of_files_sort_as_steps_do(tmp_path: Path):
    schedule = make_schedule("gpipe", 1, 1)
    with open_mesh(MPI.COMM_SELF, MeshConfig()) as mesh:
        for step in (9, 10, 100):
            write_trace(tmp_path / "trace", step, schedule, mesh, made_up(schedule, 0), Waits(30.0))
    assert [int(path.stem[5:]) for path in sorted((tmp_path / "trace").iterdir())] == [9, 10, 100]
