"""Every fault of mutants.toml can still be made: its text is in its file exactly once, and its tests are there.

That the tests find each of them is shown by `python tests/mutants/run.py`, which takes half an hour; CI runs a sample.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import waits
from tests.mutants.run import HERE, occurs_once, read

ROOT = Path(__file__).parents[2]
MUTANTS = read(HERE / "mutants.toml")
ROOMS = {path.name for path in (ROOT / "hpcllm").iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_can_be_made(mutant):
    assert occurs_once(mutant.find, ROOT / mutant.file)
    assert mutant.find != mutant.replace
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_there_are_faults_in_every_room():
    counts = Counter(mutant.room for mutant in MUTANTS)
    assert set(counts) >= ROOMS
    assert len(MUTANTS) >= 100
    assert all(mutant.file.startswith(f"hpcllm/{mutant.room}/") for mutant in MUTANTS)


def test_each_wait_of_the_device_path_can_be_deleted():
    deletions = list(waits.deletions())
    assert len(deletions) >= 140
    assert len({one.name for one in deletions}) == len(deletions)
    for one in deletions:
        assert occurs_once(one.find, ROOT / one.file), one.name
        assert one.find != one.replace
        ast.parse((ROOT / one.file).read_text(encoding="utf-8").replace(one.find, one.replace))
        assert all((ROOT / test).exists() for mutant in one.mutants() for test in mutant.tests)
