"""Damage to the newest checkpoint: flipped bits, cut ends, strangers in the folder; the older one has to be taken.

step_9.ckpt whole, step_10.ckpt damaged --newest--> step_9.ckpt      both damaged --newest--> None, load raises
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from hpcllm.course.lab import LawError, Trial
from hpcllm.course.labs.checkpoint.states import compare, draw, path_of

OLD, NEW = 9, 10  # in the order of text the other way round
FLIPS = 64
VALUES = 80
STRANGERS = ("step_11.tmp", "step_11.ckpt.tmp", ".step_12.ckpt", "step_13", "notes.txt", "latest.ckpt")


def check_damage(trial: Trial, folder: Path) -> None:
    """Damage the newer of two checkpoints in many ways, then both."""
    states = {step: draw(trial.random, VALUES, trial.comm.size) for step in (OLD, NEW)}
    for step, state in states.items():
        trial.student.save(trial.comm, folder, step, state.parts(trial.comm.rank))
    on_rank_0(trial, lambda: _check_newest(trial, folder))
    step, parts = trial.student.load(trial.comm, folder)  # of which the newer one is left damaged
    wanted = {name: parts.get(name, array) for name, array in states[OLD].arrays.items()}
    if step != OLD:
        raise LawError("unnoticed", f"the checkpoint of step {NEW} is empty, and load returns step {step}")
    compare((step, parts), OLD, wanted, f"rank {trial.comm.rank} of {trial.comm.size}")
    on_rank_0(trial, lambda: path_of(folder, OLD).write_bytes(b""))
    _check_none(trial, folder)


def on_rank_0(trial: Trial, work: Callable[[], object]) -> None:
    """Do something on rank 0 once all ranks have come. Raises its LawError on all."""
    trial.control.Barrier()
    found = None
    if trial.control.rank == 0:
        try:
            work()
        except LawError as wrong:
            found = wrong.hint, wrong.shown
    if found := trial.control.bcast(found):
        raise LawError(*found)


def _check_newest(trial: Trial, folder: Path) -> None:
    """Ask for the newest one after each damage; leaves the newer one empty."""
    path = path_of(folder, NEW)
    missing = [step for step in (OLD, NEW) if not path_of(folder, step).exists()]
    if missing:
        raise LawError(
            "older_gone" if missing == [OLD] else "misnamed", f"there is no step_{missing[0]}.ckpt after save"
        )
    _expect(trial, folder, NEW, "text_order", f"steps {OLD} and {NEW} are there")
    for name in STRANGERS:
        (folder / name).write_bytes(path.read_bytes()[:100])
    _expect(trial, folder, NEW, "stranger", f"{' and '.join(STRANGERS)} are there, too")
    data = path.read_bytes()
    _check_flips(trial, folder, data, trial.random)
    for length in (len(data) - 1, len(data) // 2, 1, 0):
        path.write_bytes(data[:length])
        _expect(trial, folder, OLD, "cut_unnoticed", f"step_{NEW}.ckpt has {length} of its {len(data)} bytes")


def _check_flips(trial: Trial, folder: Path, data: bytes, drawn: random.Random) -> None:
    path, unnoticed = path_of(folder, NEW), []
    places = [0, len(data) - 1, *(drawn.randrange(len(data)) for _ in range(FLIPS - 2))]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << drawn.randrange(8)
        path.write_bytes(damaged)
        if _newest(trial, folder, f"a bit of byte {place} is flipped") != path_of(folder, OLD):
            unnoticed.append(place)
    if unnoticed:
        said = f"a flipped bit in byte {unnoticed[0]} of {len(data)} is not noticed ({len(unnoticed)} of {len(places)})"
        raise LawError("no_checksum" if len(unnoticed) > len(places) / 2 else "checksum_part", said)


def _newest(trial: Trial, folder: Path, told: str, hint: str = "damage_raises") -> Path | None:
    try:
        found = trial.student.newest(folder)
    except NotImplementedError:
        raise
    except Exception as error:
        raise LawError(hint, f"{told}: newest raises {type(error).__name__}: {error}") from error
    return None if found is None else Path(found)


def _expect(trial: Trial, folder: Path, step: int, hint: str, told: str) -> None:
    found = _newest(trial, folder, told, hint if hint == "stranger" else "damage_raises")
    if found != path_of(folder, step):
        raise LawError(hint, f"{told}: newest returns {found.name if found else None}, not step_{step}.ckpt")


def _check_none(trial: Trial, folder: Path) -> None:
    found = ""
    try:
        trial.student.load(trial.comm, folder)
        found = "returns"
    except FileNotFoundError:
        pass
    except Exception as error:
        found = f"raises {type(error).__name__}"
    everywhere = sorted(set(filter(None, trial.control.allgather(found))))
    if everywhere:
        raise LawError("none_there", f"no checkpoint is whole: load {' and '.join(everywhere)}")
