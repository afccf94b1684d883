"""The reference of run-file keys: complete, true to the schema, and a run file that says nothing but the defaults."""

import re

import pytest

from hpcllm.config.names import closest, key_meant
from hpcllm.config.reference import COLUMNS, find, keys, run_file
from hpcllm.config.schema import Config, key_names, parse
from hpcllm.errors import ConfigError


def test_every_key_has_a_type_a_default_and_a_reason():
    assert [each.key for each in keys()] == key_names()
    assert [each.key for each in keys() if not (each.type and each.default and each.about)] == []


def test_the_choices_and_ranges_are_those_that_are_checked():
    by_key = {each.key: each for each in keys()}
    assert by_key["precision.compute"].valid == "fp32, bf16, fp16"
    assert by_key["run.steps"].valid == "1 to 1e9"


def test_the_run_file_is_valid_with_every_key_commented_out_or_in():
    text = run_file()
    assert parse(text) == Config()
    everything = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert everything.count(" = ") >= len(keys())
    assert parse(everything) == Config()
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_a_pattern_finds_a_table_a_name_or_a_word_of_the_reason():
    assert {each.table for each in find("mesh")} == {"mesh"}
    assert [each.key for each in find("LEARNING")] == ["optimizer.learning_rate"]
    assert "checkpoint.every_steps" in [each.key for each in find("*.every_steps")]
    assert "optimizer.shard" in [each.key for each in find("ZeRO")]
    assert find("nothing of the kind") == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("run.stpes", "run.steps"),
        ("batch-size", "data.global_batch"),
        ("model.n_layer", "model.layers"),
        ("pipeline.layer", "pipeline.layers"),
        ("checkpoint.every", "checkpoint.every_steps"),
        ("qqqq", ""),
    ],
)
def test_a_foreign_or_mistyped_key_means_one_of_ours(word, key):
    assert key_meant(word, key_names()) == key


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.lr=1", "optimizer.learning_rate"),
        ("lr=1", "optimizer.learning_rate=1"),
        ("optim.learning_rate=1", "optimizer"),
        ("train.lr=1", "optimizer.learning_rate"),
        ("model.preset=tinny", "tiny"),
        ("pipeline.schedule=1fb1", "1f1b"),
    ],
)
def test_an_override_that_cannot_be_names_what_was_meant(override, meant):
    with pytest.raises(ConfigError, match=meant):
        parse("", [override])


def test_names_are_taken_in_any_case():
    config = parse("", ["pipeline.schedule=GPipe", "model.preset=Tiny", "precision.compute=BF16"])
    assert (config.pipeline.schedule, config.model.preset, config.precision.compute) == ("gpipe", "tiny", "bf16")
    assert closest("Frontir", ["frontier", "lumi-g"]) == "frontier"
