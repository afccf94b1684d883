"""Presets: each is a valid model, and has as many parameters as its paper or its published weights say."""

from __future__ import annotations

import re

import pytest

from hpcllm.config.schema import PRESETS, from_tables, preset_names
from hpcllm.model.shapes import parameter_count

# name -> (published, relative tolerance). Counts of published weights are exact; GPT-3's weights are not published,
# and table 2.1 of arXiv:2005.14165 rounds its total ("175.0B"), which its own shape misses by 0.23 %.
PUBLISHED = {
    "gpt2-124m": (124_439_808, 0.0),
    "gpt2-355m": (354_823_168, 0.0),
    "gpt2-774m": (774_030_080, 0.0),
    "gpt2-1558m": (1_557_611_200, 0.0),
    "llama-1b": (1_235_814_400, 0.0),
    "llama-7b": (6_738_415_616, 0.0),
    "llama-8b": (8_030_261_248, 0.0),
    "llama-13b": (13_015_864_320, 0.0),
    "llama-70b": (70_553_706_496, 0.0),
    "llama-405b": (405_853_388_800, 0.0),
    "neox-20b": (20_554_567_680, 0.0),
    "gpt3-175b": (175_000_000_000, 0.003),
}


def count(name: str) -> int:
    return parameter_count(from_tables({"model": {"preset": name}}).model)


def test_every_preset_but_tiny_has_a_published_count():
    assert set(preset_names()) == {"tiny", *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    published, tolerance = PUBLISHED[name]
    assert abs(count(name) - published) <= tolerance * published


@pytest.mark.parametrize("name", PUBLISHED)
def test_first_line_says_the_count(name):
    first_line = (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    said = re.search(r"([\d,]+) parameters", first_line)
    assert said is not None
    assert int(said[1].replace(",", "")) == count(name)
