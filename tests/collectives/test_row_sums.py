"""Sums of rows at addresses: in order, in fp32, rounded once, and nothing written beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.collectives.node_kernels import KINDS
from hpcllm.collectives.row_sums import BLOCK, STEP, sum_rows

LENGTHS = (0, 1, STEP - 1, STEP, STEP + 1, 5 * STEP + 17, 2 * BLOCK + STEP + 3)


def addresses(rows):
    return np.array([row.data_ptr() for row in rows], dtype=np.uint64)


@pytest.mark.parametrize("dtype", [dtype for dtype in KINDS if dtype != torch.uint8], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", LENGTHS)
def test_rows_are_added_in_order_and_rounded_once(dtype, rows, n):
    random = torch.Generator().manual_seed(n)
    scale = 10.0 ** torch.arange(rows).view(-1, 1).remainder(4)  # another order of additions gives other bits
    values = (torch.randn(rows, n + 2, generator=random) * scale).to(dtype)
    expected = values[0].float()
    for row in values[1:]:
        expected = expected + row.float()
    for targets in (list(range(rows)), [rows - 1]):  # all of them, as an allreduce; one of them, as a reduce-scatter
        x = values.clone()
        second = x.element_size()  # from the second value of each row on
        sum_rows(KINDS[dtype], addresses(x), addresses([x[row] for row in targets]), second, n)
        for row in range(rows):
            want = values[row].clone()
            if row in targets:
                want[1 : n + 1] = expected.to(dtype)[1 : n + 1]
            assert torch.equal(x[row], want)


def test_a_sum_may_go_to_memory_of_its_own():
    x, out = torch.arange(300.0).view(3, 100), torch.zeros(100)
    sum_rows(KINDS[x.dtype], addresses(x), addresses([out]), 0, 100)
    assert torch.equal(out, x.sum(0))
    assert torch.equal(x, torch.arange(300.0).view(3, 100))


def test_what_is_no_number_stays_none():
    x = torch.tensor([[np.inf, np.nan, -np.inf, -0.0] * 20, [-np.inf, 1.0, 2.0, -0.0] * 20])
    expected = (x[0] + x[1]).clone()
    sum_rows(KINDS[x.dtype], addresses(x), addresses(x), 0, x.shape[1])
    for row in x:
        assert torch.equal(row.isnan(), expected.isnan())
        assert row.nan_to_num().view(torch.int32).tolist() == expected.nan_to_num().view(torch.int32).tolist()
