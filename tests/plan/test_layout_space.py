"""Constraints read as they are written, and hold; nonsense is refused with what would be valid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.errors import ConfigError
from hpcllm.plan.layout_space import CHOSEN, RELATIONS, Constraint, parse_constraints
from hpcllm.plan.layouts import layout_types

numbers = st.builds(
    lambda key, relation, value: Constraint(key, relation, (value,)),
    st.sampled_from(["tp", "pp", "dp", "micro_batch", "chunks"]),
    st.sampled_from(RELATIONS),
    st.integers(1, 4096),
)
words = st.builds(
    lambda relation, values: Constraint("recompute", relation, tuple(values)),
    st.sampled_from(["=", "!="]),
    st.lists(st.sampled_from(["none", "selective", "full"]), min_size=1, unique=True),
)


@given(st.lists(numbers | words, min_size=1, max_size=6))
def test_a_constraint_is_read_as_it_is_written(constraints):
    text = ",".join(one.text for one in constraints)
    assert parse_constraints(text).all == tuple(constraints)
    assert parse_constraints([one.text for one in constraints]).all == tuple(constraints)


@given(numbers, st.integers(1, 4096))
def test_a_number_is_allowed_as_the_relation_says(one, value):
    said = one.relation if one.relation != "=" else "=="
    assert one.allows(value) == eval(f"{value} {said} {one.values[0]}")


def test_named_values_are_choices_and_all_hold():
    limits = parse_constraints("micro_batch=24|2|1,micro_batch<=2,tp!=3,order=tp,pp,dp")
    assert limits.choices("micro_batch", [1, 2, 4]) == [2, 1]
    assert limits.choices("tp", [1, 2, 3, 4]) == [1, 2, 4]
    assert limits.choices("order", ["tp,dp,pp"]) == ["tp,pp,dp"]
    assert limits.choices("pp", range(3)) == [0, 1, 2]
    assert limits.with_values(micro_batch=[8], pp=[2]).choices("pp", [1, 2]) == [2]
    assert limits.with_values(micro_batch=[8]).choices("micro_batch", [8]) == [2, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "should read key=value"),
        ("tp", "'tp' should read key=value"),
        ("tp<=", "should read key=value"),
        ("=4", "should read key=value"),
        ("heads=4", "does not choose 'heads'.*valid: .*tp"),
        ("attention=flash", "does not choose 'attention'"),
        ("tp=two", r"layout\.tp = 'two' should be a whole number"),
        ("tp<=0", r"layout\.tp = 0 is out of range"),
        ("recompute=half", "should be one of 'none', 'selective', 'full'"),
        ("schedule<=1f1b", "schedule is not a number; valid: = and !="),
        ("tp<=1|2", "several values go with = and != only"),
        ("order=tp,pp", r"order = 'tp,pp' is out of range"),
    ],
)
def test_nonsense_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_constraints(text)


def test_all_keys_are_keys_of_a_layout():
    assert set(CHOSEN) < set(layout_types())
