"""`hpcllm codecs`: its columns say what the codecs do, and its list is that of the codecs and policies there are."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hpcllm.cli.lists import CODECS
from hpcllm.cli.main import main
from hpcllm.codecs import find_codec
from hpcllm.codecs.names import DEFAULTS, examples
from hpcllm.config.policies import POLICIES, TRAFFIC

VALUES = 1 << 16


@pytest.fixture
def listed(capsys) -> dict:
    assert main(["codecs", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_kind_is_listed_with_what_it_does(listed):
    assert set(CODECS) == set(DEFAULTS)
    assert [fact["name"] for fact in listed["codecs"]] == list(examples())
    assert listed["policies"] == POLICIES


def test_bits_and_losses_are_those_of_encoded_gradients(listed):
    scales = np.exp(np.random.default_rng(0).standard_normal(VALUES // 256)).repeat(256)
    values = torch.from_numpy((np.random.default_rng(1).standard_normal(VALUES) * scales).astype("f4"))
    for fact in listed["codecs"]:
        codec = find_codec(fact["name"], torch.float32)
        sent = codec.encode(values, torch.empty(codec.encoded_bytes(VALUES), dtype=torch.uint8))
        got = torch.empty_like(values)
        codec.decode(sent, got)
        assert torch.equal(got, values) == fact["lossless"]
        is_fixed = fact["name"] not in ("exp", "mpc")  # of these the list says what was measured on a run's gradients
        assert 8 * sent.numel() / VALUES == pytest.approx(fact["bits_of_float32"], rel=1e-3 if is_fixed else 0.1)


def test_each_row_shows_what_json_has(listed, capsys):
    assert main(["codecs"]) == 0
    codecs, notes, policies = capsys.readouterr().out.split("\n\n")
    head, *rows = codecs.splitlines()
    assert head.split() == ["codec", "bits", "lossless", "what", "it", "does"]
    for row, fact in zip(rows, listed["codecs"], strict=True):
        name, bits, lossless, about = row.split(maxsplit=3)
        assert (name, lossless, about) == (fact["name"], "yes" if fact["lossless"] else "no", fact["about"])
        assert float(bits) == pytest.approx(fact["bits_of_float32"], rel=1e-3)
    assert "bits" in notes
    head, *rows = [line.split() for line in policies.splitlines()]
    assert head == ["policy", *TRAFFIC]
    assert {name: cells for name, *cells in rows} == {
        name: [chosen.get(kind, "raw") for kind in TRAFFIC] for name, chosen in POLICIES.items()
    }
