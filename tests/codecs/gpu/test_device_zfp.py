"""`zfp` by the kernels of devices, emulated: the CPU's bytes, and its values for any bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_cases import Guarded, bits, cases_of, guarded_bytes
from emulated import EMULATOR, WAVEFRONTS, emulated, why_not
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import VALUE_TYPES
from hpcllm.errors import CodecError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
RATES = [3, 4, 7, 8, 13, 16, 17, 24, 31, 32]  # blocks of 12 to 128 bits: parts of a word, whole words, words and parts
every_rate = pytest.mark.parametrize(("rate", "dtype"), [(rate, VALUE_TYPES[i % 3]) for i, rate in enumerate(RATES)])
every_wave = pytest.mark.parametrize("launcher", [EMULATOR, WAVEFRONTS], ids=["warps", "wavefronts"])
cases = cases_of(st.integers(0, 9), st.integers(0, 700))


def decoded(codec, data, n, dtype, shift=0):
    room = Guarded(n * dtype.itemsize, shift)
    codec.decode(data, room.values(dtype))
    assert room.intact()
    return room.values(dtype).clone()


def check_values(host, device, data, n, shift):
    for dtype in {host.dtype, torch.float32}:
        assert torch.equal(bits(decoded(device, data, n, dtype, shift)), bits(decoded(host, data, n, dtype)))
    total = torch.linspace(-1, 1, n)
    expected = total.clone()
    device.decode_add(data, total)
    host.decode_add(data, expected)
    assert torch.all((bits(total) == bits(expected)) | (total.isnan() & expected.isnan()))


@every_rate
@every_wave
@settings(max_examples=20)
@given(case=cases)
def test_bytes_and_values_are_the_cpus(rate, dtype, launcher, case):
    host, device = find_codec(f"zfp:{rate}", dtype), emulated(f"zfp:{rate}", dtype, launcher)
    values = case.values(dtype)
    data = guarded_bytes(device, values, case.shift)
    assert torch.equal(data, guarded_bytes(host, values))
    check_values(host, device, data, case.n, case.shift)


@every_rate
@every_wave
@settings(max_examples=20)
@given(n=st.integers(0, 600), seed=st.integers(0, 1 << 30), density=st.sampled_from([0.02, 0.1, 0.5, 0.9]))
def test_any_bytes_decode_to_the_cpus_values(rate, dtype, launcher, n, seed, density):
    """Headers that no encoder writes, codes that end too early, sums that wrap around."""
    host, device = find_codec(f"zfp:{rate}", dtype), emulated(f"zfp:{rate}", dtype, launcher)
    rng = np.random.default_rng(seed)
    data = np.packbits(rng.random(8 * host.encoded_bytes(n)) < density)
    check_values(host, device, torch.from_numpy(data), n, seed % 5)


def test_wrong_lengths_are_rejected():
    device = emulated("zfp:16", torch.float32)
    data = guarded_bytes(device, torch.ones(100))
    for wrong in (data[:0], data[:-4], torch.cat([data, data[:4]])):
        with pytest.raises(CodecError, match="for 100 values"):
            device.decode(wrong, torch.empty(100))
