"""Sizes, names and numbers of the command line: what is valid is understood, what is not is named."""

from __future__ import annotations

import argparse
import importlib.util
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcllm.errors import ConfigError
from hpcllm.perf.arguments import Options, add_collective_arguments, options_of, parse_size, parse_sizes
from hpcllm.perf.records import size_text


def options(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_collective_arguments(parser)
    return options_of(parser.parse_args(words))


@given(st.integers(1, 1 << 40))
def test_a_size_reads_as_it_is_written(size):
    assert parse_size(size_text(size)) == size
    assert parse_size(str(size)) == size


@given(st.integers(0, 30), st.sampled_from("KMGkmg"), st.sampled_from(["", "B", "iB"]))
def test_units_are_powers_of_1024(count, unit, ending):
    text, size = f"{count}{unit}{ending}", count * 1024 ** ("KMG".index(unit.upper()) + 1)
    if size == 0:
        with pytest.raises(ConfigError, match="is no size"):
            parse_size(text)
    else:
        assert parse_size(text) == size


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 24))
def test_a_range_doubles_from_its_first_to_its_last(first, more):
    first, last = 4 * first, 4 * first + 4 * more
    sizes = parse_sizes(f"{first}:{last}", 4)
    assert (sizes[0], sizes[-1]) == (first, last)
    assert list(sizes) == sorted(set(sizes))
    assert all(b == 2 * a for a, b in pairwise(sizes[:-1]))
    assert last <= 2 * (sizes[-2] if len(sizes) > 1 else first)


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=9))
def test_a_list_is_sorted_and_each_size_comes_once(numbers):
    assert parse_sizes(",".join(str(2 * n) for n in numbers), 2) == tuple(sorted({2 * n for n in numbers}))


@pytest.mark.parametrize(
    "text",
    ["", "K", "1Q", "-1K", "0", "1.5K", "1K:", ":1K", "2K:1K", "1K,,2K", "1e3", "\N{FULLWIDTH DIGIT NINE}K", "2000G"],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text, 4)


@pytest.mark.parametrize(
    ("dtype", "size", "fits"), [("float32", "6", False), ("bfloat16", "6", True), ("float16", "3", False)]
)
def test_sizes_are_whole_numbers_of_values(dtype, size, fits):
    if fits:
        assert options("--dtype", dtype, "--sizes", size).sizes == (int(size),)
    else:
        with pytest.raises(ConfigError, match="no whole number of values"):
            options("--dtype", dtype, "--sizes", size)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--codecs", "int9"], "codec 'int9' is unknown; did you mean int8?"),
        (["--codecs", "raw,"], "--codecs 'raw,' has an empty name"),
        (
            ["--dtype", "float64"],
            "--dtype 'float64' is unknown; did you mean float16? valid: bfloat16, float16",
        ),
        (["--device", "tpu"], "--device 'tpu' is unknown; did you mean gpu? valid: cpu, gpu"),
        (["--gpu-aware", "maybe"], "--gpu-aware 'maybe' is unknown; valid: auto, no, yes"),
        (["--memory", "common"], "--memory 'common' is unknown; valid: private, shared"),
        (["--iterations", "-3"], "--iterations '-3' is no count"),
        (["--warmup", "x"], "--warmup 'x' is no count"),
        (["--bandwidth", "0"], "--bandwidth '0' is no bandwidth; valid: GB/s"),
        (["--bandwidth", "nan"], "--bandwidth 'nan' is no bandwidth"),
        (["--plot", "x.gif"], "'x.gif' cannot be drawn; valid: a name that ends in .png or .svg"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_with_what_would_be_valid(words, said):
    with pytest.raises(ConfigError) as refused:
        options(*words)
    assert said in str(refused.value)


def test_without_matplotlib_a_picture_is_refused_before_the_work(monkeypatch):
    found = importlib.util.find_spec
    hide = lambda name: None if name == "matplotlib" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        options("--plot", "x.png")


def test_codecs_are_spelled_out_and_come_once():
    assert options("--codecs", "int8,int8:256,raw").codecs == ("int8:256", "raw")


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_by_default_a_longer_array_is_timed_less_often_but_often_enough(a, b):
    short, long = sorted((a, b))
    default = options()
    assert 7 <= default.rounds(long) <= default.rounds(short) <= 200
    assert options("--iterations", "3").rounds(a) == 3
