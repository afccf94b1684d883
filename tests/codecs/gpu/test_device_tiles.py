"""`exp` and `mpc` by the kernels of devices, emulated: the CPU's bytes and values, and what it rejects."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_cases import Guarded, bits, cases_of, guarded_bytes
from emulated import EMULATOR, WAVEFRONTS, emulated, why_not
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hpcllm.codecs import find_codec
from hpcllm.codecs.catalogue import VALUE_TYPES
from hpcllm.codecs.gpu.device_codecs import damage_words
from hpcllm.errors import CodecError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
every_codec = pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in ("exp", "mpc") for dtype in VALUE_TYPES]
)
every_wave = pytest.mark.parametrize("launcher", [EMULATOR, WAVEFRONTS], ids=["warps", "wavefronts"])
CPU = torch.device("cpu")
EDGES = [0, 1, 2, 31, 33, 1023, 1024, 1025, 2047, 2049]
cases = cases_of(st.integers(0, 70), st.sampled_from(EDGES))


def same(x, y):
    """Bit for bit; of sums any NaN is as good as another."""
    return bool(torch.all((bits(x) == bits(y)) | (x.isnan() & y.isnan())))


def told(codec):
    """The damage that the codec has met since the last call, and the word forgets."""
    words = [word for other, word in damage_words(CPU) if other == codec]
    tiles = [int(word.item()) for word in words]
    for word in words:
        word.zero_()
    return [codec.damage(tile) for tile in tiles if tile]


def outcome(codec, data, n, dtype):
    """The decoded values; None if the bytes are rejected, now or when asked. Nothing is written beside them."""
    room = Guarded(n * dtype.itemsize)
    try:
        codec.decode(data, room.values(dtype))
        if told(codec):
            return None
    except CodecError:
        return None
    finally:
        assert room.intact()
    return room.values(dtype).clone()


@every_codec
@every_wave
@settings(max_examples=12)
@given(case=cases)
def test_bytes_and_values_are_the_cpus(name, dtype, launcher, case):
    host, device, values = find_codec(name, dtype), emulated(name, dtype, launcher), case.values(dtype)
    data = guarded_bytes(device, values, case.shift)
    assert torch.equal(data, guarded_bytes(host, values))
    assert torch.equal(bits(outcome(device, data, case.n, dtype)), bits(values))
    assert same(outcome(device, data, case.n, torch.float32), outcome(host, data, case.n, torch.float32))
    total = torch.linspace(-1, 1, case.n)
    expected = total.clone()
    device.decode_add(data, total)
    host.decode_add(data, expected)
    assert same(total, expected)


def scattered(dtype, seed):
    """A tile or two whose exponents lie about a window, beside it, far from it and at both ends of what there is."""
    rng, bits_above = np.random.default_rng(seed), 8 if dtype != torch.float16 else 5
    n, top = int(rng.choice([1024, 1024, 1024, 700, 2048])), (1 << bits_above) - 1
    exponents = rng.integers(0, top + 1) + np.rint(rng.normal(0, rng.choice([0.3, 1, 3, 8, 60]), n))
    exponents = np.where(rng.random(n) < rng.choice([0, 0.02, 0.5]), rng.integers(0, top + 1, n), exponents)
    exponents = np.where(rng.random(n) < rng.choice([0, 0.1, 0.9]), rng.choice([0, top]), exponents)
    exponents = np.clip(exponents, 0, top) if rng.random() < 0.5 else exponents % (top + 1)
    width = 8 * dtype.itemsize
    words = rng.integers(0, 1 << width, n) & ~(top << (width - 1 - bits_above))
    words |= exponents.astype(np.int64) << (width - 1 - bits_above)
    return torch.from_numpy(words.astype(f"u{dtype.itemsize}").view(f"i{dtype.itemsize}")).view(dtype)


@every_wave
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_windows_and_escapes_are_the_cpus(dtype, launcher):
    """Records of every mode come up, nibbles that share a byte with the next lane's, and far bytes."""
    host, device, modes, far = find_codec("exp", dtype), emulated("exp", dtype, launcher), set(), 0
    for seed in range(40):
        values = scattered(dtype, seed)
        data = guarded_bytes(host, values)
        assert torch.equal(guarded_bytes(device, values), data), seed
        assert torch.equal(bits(outcome(device, data, values.numel(), dtype)), bits(values)), seed
        modes.add(int(data[16]))
        far += int(data[20]) if data[16] <= 4 else 0
    assert {1, 2, 3, 4, 255} <= modes
    assert far > 100


@every_wave
def test_a_row_of_escapes_only(launcher):
    """Every lane counts: rows with 0, 1, 2 and 32 escapes in turn, an even and an odd number of them before each."""
    host, device = find_codec("exp", torch.bfloat16), emulated("exp", torch.bfloat16, launcher)
    values = torch.ones(1024)
    values += torch.linspace(0, 0.9, 1024)
    for row, count in enumerate([1, 0, 0, 2, 32, 1, 1, 32, 31, 0, 3]):
        values[32 * row : 32 * row + count] = 2.0 ** torch.arange(-40, -40 + count)
    values = values.bfloat16()
    data = guarded_bytes(host, values)
    assert data[18] >= 100
    assert torch.equal(guarded_bytes(device, values), data)
    assert torch.equal(bits(outcome(device, data, 1024, torch.bfloat16)), bits(values))


def damage(data, rng, table_end):
    """Bits or bytes of the header, the table or the bodies are wrong, or all of it is noise behind a right header."""
    data = data.clone()
    kind = rng.integers(0, 4)
    if kind == 0:
        data[rng.integers(0, table_end)] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        data[rng.integers(min(table_end, data.numel() - 1), data.numel())] ^= 1 << int(rng.integers(0, 8))
    elif kind == 2:
        places = rng.integers(16, data.numel(), 4)
        data[places] = torch.from_numpy(rng.integers(0, 256, 4, dtype="u1"))
    else:
        data[16:] = torch.from_numpy(rng.integers(0, int(rng.choice([2, 5, 256])), data.numel() - 16, dtype="u1"))
    return data


@every_codec
@every_wave
def test_what_the_cpu_rejects_is_rejected(name, dtype, launcher):
    """And what it takes gives the same values. A stream that was damaged leaves nothing behind for the next one."""
    host, device = find_codec(name, dtype), emulated(name, dtype, launcher)
    rng, rejected = np.random.default_rng(2), 0
    for turn in range(120):
        n = int(rng.choice([1, 40, host.block, host.block + 37]))
        values = scattered(dtype, turn).repeat(3)[:n]
        good = guarded_bytes(host, values)
        bad = damage(good, rng, host.table_end(n))
        expected = outcome(host, bad, n, dtype)
        found = outcome(device, bad, n, dtype)
        assert (found is None) == (expected is None), turn
        assert found is None or torch.equal(bits(found), bits(expected)), turn
        rejected += found is None
        if turn % 20 == 0:
            assert torch.equal(bits(outcome(device, good, n, dtype)), bits(values))
    assert 20 < rejected < 120


@every_wave
def test_escapes_past_the_end_are_not_written(launcher):
    """No encoder makes them, but nothing that the CPU checks is against them: it drops them, too."""
    n, words = 40, [16 + 8 + 60, 0, 40, 0, 1 | 100 << 8 | 24 << 16, 0, 0, 0xFFFFFF00, *[0x01010101] * 13]
    data = torch.from_numpy(np.array(words, "<u4").view("u1").copy())  # one plane; places 40 to 63 of 40 are masked
    expected = outcome(find_codec("exp", torch.bfloat16), data, n, torch.bfloat16)
    assert expected is not None
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(outcome(emulated("exp", torch.bfloat16, launcher), data, n, dtype), expected.to(dtype))


@every_codec
def test_wrong_lengths_are_rejected(name, dtype):
    """At once where no stream of so many values has that length, else when asked."""
    device, n = emulated(name, dtype), 3000
    data = guarded_bytes(device, torch.linspace(-1, 1, n).to(dtype))
    too_long = torch.zeros(device.encoded_bytes(n) + 4, dtype=torch.uint8)
    for wrong in (data[:0], data[:15], data[: device.table_end(n) - 4], too_long):
        with pytest.raises(CodecError, match="bytes for 3000 values"):
            device.decode(wrong, torch.empty(n, dtype=dtype))
    assert outcome(device, data[:-4], n, dtype) is None
    with pytest.raises(CodecError, match="header says 3000 values"):
        device.used_bytes(data, 2999)
    with pytest.raises(CodecError, match="fewer than the 16"):
        device.used_bytes(data[:15], n)


class Copies(TorchDispatchMode):
    """Counts the times that the host asks a device for values: on the CPU, copies of bytes and scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten._local_scalar_dense)
        return func(*args, **kwargs or {})


@every_codec
def test_an_encoding_waits_for_the_device_once(name, dtype):
    """On the CPU `.cpu()` copies nothing, so it is scalars that are counted: one, of the copied word."""
    device, values = emulated(name, dtype), torch.linspace(-1, 1, 3000).to(dtype)
    out = torch.empty(device.encoded_bytes(3000), dtype=torch.uint8)
    device.encode(values, out)  # makes the word of damage, once
    with Copies() as copies:
        device.encode(values, out)
    assert copies.count <= 1


@every_codec
def test_damage_is_told_once_at_the_next_wait(name, dtype):
    """By the tile: decode itself does not wait for the device."""
    device = emulated(name, dtype)
    n, step = 2 * device.block + 5, device.format.record_bytes
    values = torch.linspace(-1, 1, n).to(dtype)
    data = guarded_bytes(device, values)
    bad = data.clone()
    bad[16 + step : 16 + 2 * step] = 253
    for wait in (lambda: device.used_bytes(data, n), lambda: guarded_bytes(device, values)):
        out = torch.full((n,), 7.0, dtype=dtype)
        device.decode(bad, out)
        assert torch.all(out == 7)  # one wrong record, and nothing is written
        with pytest.raises(CodecError, match=f"{name}: tile 1 "):
            wait()
        wait()
    device.decode(bad, torch.empty(n, dtype=dtype))
    assert [text.startswith(f"{name}: tile 1 ") for text in told(device)] == [True]
    assert told(device) == []
