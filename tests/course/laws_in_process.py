"""The laws of a lab, run by the ranks of a test, on the variants of course/LAB: no job of their own, no limits.

For files that end on all ranks at once: right ones, and wrong ones whose mistake every rank sees.
"""

from __future__ import annotations

import random
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from mpi4py import MPI

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import Lab, Law, LawError, Trial
from hpcllm.course.watched import watched

COURSE = Path(__file__).parents[2] / "course"


def right_files(lab: str) -> dict[str, str]:
    """Return the correct files of a lab by name."""
    return {path.stem: path.read_text() for path in sorted((COURSE / lab / "right").glob("*.py"))}


def wrong_files(lab: str, base: str) -> dict[str, tuple[str, list[str]]]:
    """Return the wrong variants of the correct file `base`: text, and the hints of which one has to come.

    Files that use the world are left to real checks: here all communicators have the world's ranks in its order.
    """
    found = {}
    for name, fault in tomllib.loads((COURSE / lab / "wrong.toml").read_text()).items():
        if fault["hints"] == ["world"]:
            continue
        text = right_files(lab)[base]
        for old, new in fault["replace"]:
            assert old in text, (name, old)
            text = text.replace(old, new, 1)
        found[name] = text, fault["hints"]
    return found


def first_fault(lab_name: str, text: str, comm: MPI.Intracomm, folder: Path, seed: int = 0) -> str:
    """Return the hint of the first law that does not hold on these ranks, '' if all hold. Collective over comm."""
    lab, student = load_lab(LABS[lab_name]), ModuleType("student")
    exec(compile(text, "student", "exec", dont_inherit=True), student.__dict__)
    file = folder / f"student_{comm.rank}.py"  # for laws that start processes
    file.write_text(text)
    student.__file__ = str(file)
    try:
        for number, law in enumerate(lab.laws):
            if comm.size in law.ranks:
                _hold(lab, law, student, comm, folder, f"{seed}/{number}")
    except LawError as wrong:
        return wrong.hint
    return ""


def _hold(lab: Lab, law: Law, student: ModuleType, comm: MPI.Intracomm, folder: Path, seed: str) -> None:
    ours = sys.modules[f"hpcllm.course.labs.{lab.name}.checks"]
    for number, case in enumerate(law.cases(random.Random(seed), comm.size)):
        own = comm.Dup()
        late = watched(own, lab.forbidden, random.Random(f"{seed}/{number}/{comm.rank}"))
        law.check(Trial(student, ours, late, comm, random.Random(f"{seed}/{number}"), folder, case))
        own.Free()
