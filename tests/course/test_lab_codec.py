"""Lab 3 on right and wrong files: no right one fails a law, each mistake gets the hint that names it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hpcllm.course.catalogue import LABS, load_lab
from hpcllm.course.labs.codec import ours
from hpcllm.course.labs.codec.diagnosis import wrong_encoding, wrong_values
from hpcllm.course.labs.codec.summed import bound
from tests.course.laws_in_process import first_fault, right_files, wrong_files

LAB = "codec"
FOR_REAL_CHECKS = ("everybody_sends_first", "not_waited_for", "a_value_at_a_time")  # a deadlock, a request, a slow file
OF_SEVERAL_RANKS = (
    *("owner_keeps_its_sum", "own_addend_left_out", "sums_as_float32", "all_to_all", "written_elsewhere"),
)
WRONG = wrong_files(LAB, "plain")
ALONE = sorted(set(WRONG) - {*FOR_REAL_CHECKS, *OF_SEVERAL_RANKS})


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(right_files(LAB)))
def test_right_files_obey_every_law(name, comm, shared_path):
    assert first_fault(LAB, right_files(LAB)[name], comm, shared_path) == ""


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # mistakes divide by zero, and cast NaN
@pytest.mark.parallel([1])
@pytest.mark.parametrize("name", ALONE)
def test_a_mistake_gets_the_hint_that_names_it(name, comm, shared_path):
    text, hints = WRONG[name]
    found = {first_fault(LAB, text, comm, shared_path, seed) for seed in range(3)}
    assert found <= set(hints)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_a_mistake_of_several_ranks_gets_its_hint_on_all_of_them(name, comm, shared_path):
    text, hints = WRONG[name]
    assert first_fault(LAB, text, comm, shared_path) in hints


@pytest.mark.parametrize("name", sorted(WRONG))
def test_every_hint_that_has_to_come_has_words(name):
    lab = load_lab(LABS[LAB])
    assert all(lab.hint(key) != lab.hint("other") or key == "other" for key in WRONG[name][1])


@pytest.mark.parallel([1, 3, 4])
def test_what_races_run_obeys_the_laws(comm, shared_path):
    text = "from hpcllm.course.labs.codec.ours import allreduce, decode, encode, pays_from, with_feedback"
    assert first_fault(LAB, text, comm, shared_path) == ""


@pytest.mark.parametrize("n", [1, 255, 256, 257, 2000])
def test_any_damaged_byte_of_an_encoding_is_found(n):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    data = ours.encode(x)
    for place in (0, 4 * ours.blocks_of(n), data.size - 1):  # a scale, the first code, the last
        damaged = data.copy()
        damaged[place] ^= 0x40
        if place:
            assert wrong_encoding(damaged, x)
    damaged = data.copy()
    damaged[3] ^= 0x01  # the exponent of the first scale
    assert wrong_encoding(damaged, x)
    assert wrong_encoding(data, x) is None


@pytest.mark.parametrize("n", [1, 256, 300])
def test_a_decoded_value_that_is_off_by_a_thousandth_is_found(n):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    parts = ours.parts_of(ours.encode(x), n)
    values = ours.decode(ours.encode(x), n)
    assert wrong_values(values, *parts) is None
    place = int(np.abs(values).argmax())
    values[place] *= 1.001
    assert wrong_values(values, *parts)


def test_the_bound_of_a_sum_is_kept_by_ours_and_broken_by_six_bits():
    drawn = np.random.default_rng(0)
    addends = drawn.standard_normal((4, 1000)).astype(np.float32)
    exact = addends.astype(np.float64).sum(axis=0)
    encoded = sum(ours.decode(ours.encode(row), row.size) for row in addends)
    coarse = sum(np.rint(row / np.abs(row).max() * 31) * np.abs(row).max() / 31 for row in addends)
    assert np.abs(encoded - exact).max() <= bound(addends) < np.abs(coarse - exact).max()


def test_the_model_has_the_message_of_both_ways_take_as_long():
    for link, call_s, codec in itertools.product((1e6, 1e8), (1e-6, 1e-4), (1e9, 5e9)):
        n = ours.pays_from(link, call_s, codec)
        assert 4 * n / link == pytest.approx(n * (1 + 4 / ours.BLOCK) / link + call_s + 4 * n / codec)
    assert ours.pays_from(1e9, 1e-6, 1e9) == math.inf
