"""Lab 5 on right and wrong files: no right one fails a law, each mistake gets the hint that names it."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.labs.tensor_parallel import ours
from hpcllm.course.labs.tensor_parallel.checks import block, block_arrays
from tests.course.laws_in_process import first_fault, right_files, wrong_files

LAB = "tensor_parallel"
FOR_REAL_CHECKS = (  # a deadlock, a slow file, one that raises; what one rank sees, or does alone; a prediction
    *("root_alone", "loops", "kept_from_forward", "bias_gradient_on_rank_0", "reshaped", "sums_forward_only"),
)
MISTAKES = sorted(set(wrong_files(LAB, "plain")) - set(FOR_REAL_CHECKS))


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(right_files(LAB)))
def test_right_files_obey_every_law(name, comm, shared_path):
    assert first_fault(LAB, right_files(LAB)[name], comm, shared_path) == ""


@pytest.mark.parallel([3])  # of which two parts of an uneven cut differ
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_the_hint_that_names_it(name, comm, shared_path):
    text, hints = wrong_files(LAB, "plain")[name]
    assert first_fault(LAB, text, comm, shared_path) in hints


@pytest.mark.parametrize("name", sorted(wrong_files(LAB, "plain")))
def test_every_hint_that_has_to_come_has_words(name):
    lab = load_lab(LABS[LAB])
    assert all(lab.hint(key) != lab.hint("other") or key == "other" for key in wrong_files(LAB, "plain")[name][1])


@pytest.mark.parallel([1, 2, 3])
def test_the_reference_is_the_layer_that_races_run(comm):
    arrays = block_arrays(5, 6, 7, ours.own_range, comm)
    for found, wanted in zip(block(ours.REFERENCE, *arrays, comm), ours.block(*arrays, comm), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_reference_on_one_rank_is_a_plain_layer():
    drawn = np.random.default_rng(0)
    x, w, b = (drawn.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (5, 3), (5,)))
    (y,) = ours.columns(x, [(w, b)], MPI.COMM_SELF)
    np.testing.assert_allclose(y, x @ w.T + b, rtol=1e-5)
    np.testing.assert_allclose(ours.rows(x, w, b, MPI.COMM_SELF), y, rtol=1e-5)
