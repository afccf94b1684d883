"""Samples on their way to a device lie in pinned memory, which nobody may fill before the copy has read it."""

from __future__ import annotations

import pytest
import torch

from hpcllm.data.loader import Upload

pytestmark = pytest.mark.pretend


@pytest.mark.parallel([2])
def test_arrays_that_follow_one_another_do_not_meet():
    upload = Upload((1000,), torch.device("pretend", 0))
    came = [upload(torch.full((1000,), number)) for number in range(4)]
    for number, values in enumerate(came):
        assert values.cpu().unique().tolist() == [number]
