"""Every codec: what comes back is within its stated bound; what is no number stays none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcllm.codecs import CODECS

ROUNDOFF = {"raw": 0.0, "bf16": 2.0**-8}


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_codecs_hold_their_bound(codec):
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype="u4").view("f4"))
    encoded = codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8))
    decoded = torch.empty_like(values)
    codec.decode(encoded, decoded)
    ordinary = torch.isfinite(values) & (values.abs() > 2.0**-118) & (values.abs() < 3e38)
    assert torch.all((decoded - values)[ordinary].abs() <= ROUNDOFF[codec.name] * values[ordinary].abs())
    assert torch.equal(torch.isnan(decoded), torch.isnan(values))
    assert torch.all(torch.isinf(decoded)[torch.isinf(values)])
    if codec.lossless:
        assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))
    total = torch.ones_like(values)
    codec.decode_add(encoded, total)
    assert torch.equal((1 + decoded).view(torch.int32)[ordinary], total.view(torch.int32)[ordinary])


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 255])
def test_encoded_bytes_is_what_is_written(codec, n):
    out = torch.full((codec.encoded_bytes(n) + 8,), 0xA5, dtype=torch.uint8)
    encoded = codec.encode(torch.randn(n), out)
    assert encoded.numel() == codec.encoded_bytes(n)
    assert torch.all(out[codec.encoded_bytes(n) :] == 0xA5)
