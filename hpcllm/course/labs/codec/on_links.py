"""A rank that measures sums on the links it finds: `python -m hpcllm.course.labs.codec.on_links FILE OUTPUT [RATE]`.

Started by hpcllm.course.links. RATE: bytes a second, where the link has to be slept.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcllm.course.labs.codec import ours
from hpcllm.course.student_file import load_file
from hpcllm.course.watched import watched
from hpcllm.perf.timing import Case, in_turns

VALUES = 1 << 20
ROUNDS = 5


def main(file: Path, output: Path, bytes_per_s: float | None) -> None:
    """Time sums of the student's, of ours, and of float32 in turns; rank 0 writes their seconds."""
    world = MPI.COMM_WORLD
    student, comm = load_file(file), watched(world.Dup())
    comm.link_bytes_per_s = bytes_per_s
    x = np.ones(VALUES, np.float32)
    sums = {"plain_s": ours.plain_allreduce, "student_s": student.allreduce, "ours_s": ours.allreduce}
    cases = [Case(partial(each, x, comm), partial(x.fill, 1.0)) for each in sums.values()]
    seconds = in_turns(world.Dup(), cases, ROUNDS, 1, lambda: False)
    if world.rank == 0:
        found = {name: each.median for name, each in zip(sums, seconds, strict=True)}
        output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else None)
