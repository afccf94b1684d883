"""tuning.toml: what is written is what is read, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_rates import made_up_tuning

from hpcllm.collectives.tuning import load_tuning, to_text
from hpcllm.config.input_files import LARGEST_SETTINGS_BYTES
from hpcllm.errors import ConfigError

TEXT = to_text(made_up_tuning())


def test_round_trip(tmp_path):
    path = tmp_path / "my tuning.toml"
    path.write_text(TEXT, encoding="utf-8")
    loaded = load_tuning(path)
    assert loaded.rates == made_up_tuning().rates
    assert to_text(loaded) == to_text(dataclasses.replace(made_up_tuning(), facts=loaded.facts))
    assert loaded.facts["ranks"] == 4


def test_a_library_may_have_been_measured_at_one_length_only(tmp_path):
    (tmp_path / "t").write_text(TEXT.replace("short_gb_s = 0.12\nmedium_gb_s = 0.12\n", ""), encoding="utf-8")
    loaded = load_tuning(tmp_path / "t")
    assert {(call.short_gb_s, call.medium_gb_s) for call in loaded.rates.library.values()} == {(None, None)}
    assert "short_gb_s" not in to_text(loaded)


def test_one_node_has_no_far_link(tmp_path):
    tuning = made_up_tuning()
    alone = dataclasses.replace(tuning, rates=dataclasses.replace(tuning.rates, far=tuning.rates.near))
    (tmp_path / "t").write_text(to_text(alone), encoding="utf-8")
    assert "[far]" not in to_text(alone)
    assert load_tuning(tmp_path / "t").rates == alone.rates


BAD = {
    "latency_s = 2e-06": [
        ("latency_s = nan", r"near\.latency_s = nan .* above 0"),
        ("latency_s = inf", r"near\.latency_s = inf"),
        ("latency_s = -1.0", r"near\.latency_s = -1\.0"),
        ("latency_s = 0.0", r"near\.latency_s = 0\.0"),
        ("latency_s = true", r"near\.latency_s = True"),
        ('latency_s = "2"', r"near\.latency_s = '2'"),
        ("latency_s = 1979-05-27", r"near\.latency_s = "),
        ("latency_s = [1.0]", r"near\.latency_s = "),
        (f"latency_s = 1{'0' * 400}", r"near\.latency_s = 1000"),
        (f"latency_s = 1{'0' * 5000}", "cannot read"),
        ("", r"near\.latency_s is missing"),
        ("latency_s = 2e-06\nlatency = 1.0", r"unknown key near\.latency; valid: latency_s, bandwidth_gb_s"),
    ],
    "[near]": [("[neer]", "unknown key neer; valid: measured, near"), ("near = 3\n[near2]", "near")],
    "[core]": [("[core.more]", r"unknown key core\.more")],
    "[library.allreduce]": [("[library.allredduce]", r"unknown key library\.allredduce; valid: allreduce")],
    "short_gb_s = 0.12": [
        ("short_gb_s = 0", r"library\.allreduce\.short_gb_s = 0 .* above 0"),
        ("shorter_gb_s = 1", r"unknown key library\.allreduce\.shorter_gb_s; valid: latency_s, .*, medium_gb_s"),
    ],
    '[codec."int8:256".float32]': [
        ('[codec."int8:257".float32]', "int8:257.*valid"),
        ('[codec."int9".float32]', "int9.*int8:256"),
        ('[codec."int8:256".float64]', "float64; valid: float32"),
    ],
    "ranks = 4": [("ranks = -4.5", r"measured\.ranks = -4\.5 should be int"), ("colour = 4", r"measured\.colour")],
}


@pytest.mark.parametrize(("good", "bad", "message"), [(good, *rest) for good, cases in BAD.items() for rest in cases])
def test_a_wrong_key_or_value_is_named(tmp_path, good, bad, message):
    assert TEXT.count(good) >= 1
    path = tmp_path / "t.toml"
    path.write_text(TEXT.replace(good, bad, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_tuning(path)
    assert "t.toml" in str(caught.value)


def test_a_file_without_raw_has_nothing_to_compare_with(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text(TEXT.replace('codec."raw"', 'codec."fp16"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"codec\.raw\.float32"):
        load_tuning(path)


@given(lines=st.integers(0, TEXT.count("\n")), characters=st.integers(0, 60))
def test_half_a_file_is_refused_or_whole(tmp_path_factory, lines, characters):
    path = tmp_path_factory.getbasetemp() / "half.toml"
    path.write_text("\n".join(TEXT.split("\n")[:lines])[: -characters or None], encoding="utf-8")
    try:
        whole = load_tuning(path)
    except ConfigError:
        return
    assert whole.rates.codings["raw", "float32"].ratio == 1


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load_tuning(path)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(b"#" * (LARGEST_SETTINGS_BYTES + 1))
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "large", "pipe", "."):
        with pytest.raises(ConfigError, match="cannot read the tuning file"):
            load_tuning(tmp_path / name)


def test_deep_nesting_is_refused(tmp_path):
    (tmp_path / "deep").write_text("a = " + "[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_tuning(tmp_path / "deep")
