"""Every machine of the folder can be used, and a user's own file is refused with its name if it cannot."""

from __future__ import annotations

import pytest

from hpcllm import machines
from hpcllm.errors import ConfigError


@pytest.mark.parametrize("name", machines.names())
def test_every_machine_has_a_name_and_a_peak_that_grows_with_the_threads(name):
    assert machines.load(name)["cpu"]["name"]
    one = machines.peak_tflops(name, 1)
    assert one > 0
    for threads in (2, 7, 64):
        assert machines.peak_tflops(name, threads) == pytest.approx(threads * one)


def test_no_machine_no_peak():
    assert machines.peak_tflops("", 4) is None


def test_a_file_of_the_user_is_taken_by_its_path(tmp_path):
    path = tmp_path / "my laptop.toml"
    path.write_text("[cpu]\npeak_fp32_gflops_per_core = 50\n")
    assert machines.peak_tflops(str(path), 2) == pytest.approx(0.1)


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"run\.machine = 'fronteer'.*lumi-c"):
        machines.peak_tflops("fronteer", 1)


@pytest.mark.parametrize(
    "text", ["", "[cpu]\n", "cpu = 3\n", '[cpu]\npeak_fp32_gflops_per_core = "fast"\n', "[cpu\n", "\xff"]
)
def test_a_file_without_a_peak_is_refused_by_name(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.machine = '.*mine\.toml'"):
        machines.peak_tflops(str(path), 1)
