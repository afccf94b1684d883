"""Writing a trace: what a step really did, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    engine.record --> spans of this rank --clock of rank 0--> JSON lines --> rank 0: one rank after the other into
                                                                             <run>/trace/step_00000010.json

    replica 0 (a process)    rank 0 (a thread)   | F0 | F1 |  RECV_B0  |   B0   |        categories: compute, wait
                             rank 1              |RECV_F0| F0 |   B0   |

With tp each of its ranks has a pipeline to itself, and is shown and numbered as a replica. Rank 0 holds one rank's
lines at a time. Recording appends to a list, twice a microbatch and direction; while it is off the engine asks whether
it is on, and that is all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcllm.errors import HpcllmError
from hpcllm.mpi.clock_sync import measure_offset
from hpcllm.mpi.collective_errors import raise_if_any_failed
from hpcllm.mpi.mesh import Mesh
from hpcllm.mpi.wait import Waits
from hpcllm.pipeline.engine import Engine
from hpcllm.pipeline.measured import FIRST_ID
from hpcllm.pipeline.schedules import Schedule

Span = tuple[str, str, float, float]  # "compute" or "wait", what, start and end in seconds of this rank's clock
TAG = 32701


@contextmanager
def recording(engine: Engine, wanted: bool) -> Iterator[list[Span]]:
    """Record what the engine does into the list while open, if wanted."""
    spans: list[Span] = []
    if wanted:
        engine.record = lambda *span: spans.append(span)
    try:
        yield spans
    finally:
        engine.record = None


def write_trace(folder: Path, step: int, schedule: Schedule, mesh: Mesh, spans: Sequence[Span], waits: Waits) -> Path:
    """Gather the spans of all ranks into `folder`/step_XXXXXXXX.json; returns its path. Collective over the mesh.

    Raises HpcllmError on all ranks if the file cannot be written, StallError.
    """
    path = folder / f"step_{step:08}.json"
    offset = measure_offset(mesh.world, waits)
    start = min((span[2] for span in spans), default=time.perf_counter())
    common = np.array([offset.lead_s - start, offset.error_s])
    waits.allreduce(mesh.world, common, lambda: "the earliest start of a traced step", MPI.MAX)
    zero_s, error_s = offset.lead_s - common[0], float(common[1])
    replica, name = mesh.dp.rank * mesh.tp.size + mesh.tp.rank, f"replica {mesh.dp.rank}"
    if mesh.tp.size > 1:
        name += f", tp {mesh.tp.rank}"
    lines = [*_names(replica, name, mesh.pp.rank), *_events(spans, zero_s, replica, mesh.pp.rank)]
    text = ",\n".join(map(json.dumps, lines)).encode()
    error = None
    if mesh.world.rank == 0:
        pieces = _gather(mesh.world, text, waits)
        error = _write(path, pieces, json.dumps(_about(schedule, step, error_s)).encode())
        for _ in pieces:
            pass  # after a full disk: ranks still wait to get rid of theirs
    else:
        waits.all([mesh.world.Isend([text, MPI.BYTE], 0, TAG)], lambda: "rank 0 to take the trace of a step")
    raise_if_any_failed(mesh.world, error)
    return path


def _events(spans: Iterable[Span], zero_s: float, replica: int, rank: int) -> Iterator[dict[str, object]]:
    """Yield spans as Chrome's events: microseconds after zero_s, to the nanosecond."""
    for kind, what, start_s, end_s in spans:
        ts, end = (round(1e6 * (t - zero_s), 3) for t in (start_s, end_s))
        yield {"name": what, "cat": kind, "ph": "X", "ts": ts, "dur": round(end - ts, 3), **_ids(replica, rank)}


def _names(replica: int, process: str, rank: int) -> Iterator[dict[str, object]]:
    """Yield metadata that shows a replica as a process and a rank of its pipeline as a thread, in order."""
    place = {"ph": "M", **_ids(replica, rank)}
    for kind, name, number in (("process", process, replica), ("thread", f"rank {rank}", rank)):
        yield {"name": f"{kind}_name", **place, "args": {"name": name}}
        yield {"name": f"{kind}_sort_index", **place, "args": {"sort_index": number}}


def _ids(replica: int, rank: int) -> dict[str, int]:
    return {"pid": FIRST_ID + replica, "tid": FIRST_ID + rank}


def _about(schedule: Schedule, step: int, error_s: float) -> dict[str, object]:
    return {
        **schedule.shape(),
        "step": step,
        "clock_error_us": round(1e6 * error_s, 3),
        "actions": [[str(action) for action in row] for row in schedule.actions],
    }


def _gather(world: MPI.Intracomm, mine: bytes, waits: Waits) -> Iterator[bytes]:
    """Yield the lines of each rank in order, one rank at a time; for rank 0. Raises StallError."""
    yield mine
    status = MPI.Status()
    for rank in range(1, world.size):
        what = f"the trace of rank {rank}".__str__
        waits.until(partial(world.Iprobe, rank, TAG, status), what)
        text = bytearray(status.Get_count(MPI.BYTE))
        waits.all([world.Irecv([text, MPI.BYTE], rank, TAG)], what)
        yield bytes(text)


def _write(path: Path, pieces: Iterable[bytes], about: bytes) -> HpcllmError | None:
    """Write the whole file, or none of that name; returns the error if that failed."""
    aside = path.with_suffix(".json.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with aside.open("wb") as file:
            file.write(b'{"traceEvents": [\n')
            for number, piece in enumerate(pieces):
                file.write(b",\n" * (number > 0) + piece)
            file.write(b'\n],\n"displayTimeUnit": "ms",\n"otherData": ' + about + b"}\n")
        aside.replace(path)
    except OSError as error:
        return HpcllmError(f"cannot write {path}: {error.strerror}")
    return None
