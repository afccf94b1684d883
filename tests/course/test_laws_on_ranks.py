"""Laws of several ranks hold for right files of every style: no race, no luck, on communicators of this job."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.lab import LawError, Trial
from hpcllm.course.watched import watched

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "course"))

from campaign import Variant, variants  # noqa: E402 -- a folder that is no package

RIGHT = [variant for variant in variants() if not variant.hints and variant.lab in ("latency", "allreduce")]
OURS = "from hpcllm.course.labs.allreduce.ours import doubling as allreduce_small, ring as allreduce"
RIGHT.append(Variant("allreduce", "what races run", OURS))
TRAINERS = {"allreduce": "run", "pipeline": "engine"}  # lab -> its law that trains


def module_of(variant: Variant) -> SimpleNamespace:
    student = SimpleNamespace()
    exec(compile(variant.text, variant.name, "exec", dont_inherit=True), student.__dict__)
    return student


def trials(variant: Variant, law, comm, folder):
    """Each case of a law, on a watched communicator of its own; nothing may be left on it."""
    lab, drawn = load_lab(LABS[variant.lab]), random.Random(variant.name)
    for case in law.cases(drawn, comm.size):
        own = watched(comm.Dup(), lab.forbidden, random.Random(comm.rank))
        yield Trial(module_of(variant), None, own, comm, drawn, folder, case)
        assert own.waited_for()
        comm.Barrier()
        assert not MPI.Intracomm.Iprobe(own, MPI.ANY_SOURCE, MPI.ANY_TAG)
        own.Free()


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("variant", RIGHT, ids=lambda variant: f"{variant.lab}/{variant.name}")
def test_right_files_obey_every_law(variant, comm, shared_path):
    lab = load_lab(LABS[variant.lab])
    for law in lab.laws:
        if comm.size in law.ranks and law.name not in TRAINERS.values():
            for trial in trials(variant, law, comm, shared_path):
                law.check(trial)


@pytest.mark.parallel([3, 4])
def test_the_trainer_runs_by_a_student_s_functions(comm, shared_path):
    for lab_name, law_name in TRAINERS.items():
        law = next(law for law in load_lab(LABS[lab_name]).laws if law.name == law_name)
        if comm.size in law.ranks:
            variant = next(variant for variant in variants() if variant.lab == lab_name)
            for trial in trials(variant, law, comm, shared_path):
                law.check(trial)


@pytest.mark.parallel([2])
def test_a_watched_communicator_counts_persistent_sends_and_arrays_of_no_values(comm):
    own = watched(comm.Dup(), (), random.Random(0))
    peer, landing = 1 - comm.rank, bytearray(3)
    sends, receives = own.Send_init([bytearray(3), MPI.BYTE], peer), own.Recv_init([landing, MPI.BYTE], peer)
    for _ in range(2):
        receives.Start()
        sends.Start()
        sends.Wait()
        receives.Wait()
    of_two = [np.zeros(9, np.float32), np.int64(2), MPI.FLOAT]
    for length, sent in ((0, np.empty((1, 0), np.float32)), (2, of_two)):
        request = own.Isend(sent, dest=peer)  # not buffered: it ends with the receive below
        own.Recv(np.empty(length, np.float32), source=peer)
        request.Wait()
    assert (own.messages, own.sent_bytes, own.is_persistent) == (4, 6 + 0 + 8, True)
    own.Free()


@pytest.mark.parallel([2])
def test_a_watched_communicator_counts_what_is_sent_and_misses_no_request(comm):
    own = watched(comm.Dup(), ("bcast",), random.Random(0))
    peer, landing = 1 - comm.rank, bytearray(12)
    request = own.Irecv([landing, MPI.BYTE], source=peer)
    own.Isend([bytearray(range(12)), MPI.BYTE], dest=peer).Wait()
    assert (own.messages, own.sent_bytes, own.waited_for()) == (1, 12, False)
    request.Wait()
    assert own.waited_for()
    assert landing == bytearray(range(12))
    with pytest.raises(LawError, match="bcast"):
        own.bcast(1)
    own.Free()
