"""perf/library_ratios.py: every cell is measured and written down, and a table says which of them fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "perf" / "library_ratios.py"


@pytest.fixture(scope="module")
def ratios():
    spec = importlib.util.spec_from_file_location("library_ratios", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("memory", ["private", "shared"])
def test_every_cell_is_measured_and_shown(comm, ratios, tmp_path, memory):
    path = Path(comm.bcast(str(tmp_path))) / "cells.json"
    words = ["measure", "--json", str(path), "--sizes", "4K,256K", "--seconds", "0.005", "--least-rounds", "5"]
    ratios.measure_all(ratios.arguments().parse_args([*words, "--memory", memory]))
    comm.Barrier()
    cells = ratios.cells_of([path])
    assert [(cell.operation, cell.size_bytes) for cell in cells] == [
        (operation, size) for operation in ratios.OPERATIONS for size in (4096, 1 << 18)
    ]
    for cell in cells:
        assert cell.ranks == comm.size
        assert cell.least <= cell.ratio <= cell.most
        assert cell.ratio == pytest.approx(cell.library_s / cell.auto_s)
        assert cell.chosen.endswith("raw")
        assert (cell.copy_s is not None) == (memory == "shared" and cell.operation == "allreduce")
    lines = list(ratios.table([path]))
    assert lines[0].startswith("### ")
    assert f"{memory} memory" in lines[0]
    assert sum(line.startswith(tuple(f"| {operation}" for operation in ratios.OPERATIONS)) for line in lines) == 5
    failed = dataclasses.replace(cells[1], ranks=2, most=0.94)
    assert failed.fails
    assert not dataclasses.replace(failed, most=0.96).fails
    assert not dataclasses.replace(failed, size_bytes=1 << 17).fails


@given(factor=st.floats(0.2, 5), seed=st.integers(0, 99))
def test_the_interval_holds_the_ratio_that_was_put_in(ratios, factor, seed):
    random = np.random.default_rng(seed)
    ours_s = random.lognormal(0, 0.05, 200)
    ratio, least, most = ratios.ratio_interval(factor * random.lognormal(0, 0.05, 200), ours_s)
    assert least <= ratio <= most
    assert 0.95 * factor < least
    assert most < 1.05 * factor
