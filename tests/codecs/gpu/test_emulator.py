"""The emulator of device kernels finds what a device would not show, and kernels stay inside their arrays."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from emulated import EMULATOR, WAVEFRONTS, why_not

from hpcllm.codecs.gpu.compiler import Program

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
TESTS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Text(Program):
    """A kernel of a test's own, instead of a file."""

    kernel: str = ""

    def text(self) -> str:
        common = Program("casts", ()).text().split('#line 1 "casts.cu"')[0]
        head = "KERNEL kernel(u32* out, u64 groups) { if (group() >= groups) return;"
        return f'{common}\n#line 1 "kernel.cu"\n{head} {self.kernel} }}'


def run(kernel, groups=3, launcher=EMULATOR):
    out = torch.zeros(32 * groups, dtype=torch.int32)
    launcher.launch(Text("test", (), kernel=kernel), "kernel", groups, [out, groups])
    return out.view(groups, 32)


every_wave = pytest.mark.parametrize("launcher", [EMULATOR, WAVEFRONTS], ids=["warps", "wavefronts"])


@every_wave
def test_lanes_exchange_values_with_their_own_group_only(launcher):
    def run_there(kernel):
        return run(kernel, 3, launcher)

    rows = torch.arange(3).view(-1, 1)
    lanes = torch.arange(32).view(1, -1)
    put = "out[group() * 32 + lane()] = {};"
    mine = "(u32)group() * 100 + lane()"
    assert torch.equal(run_there(put.format(f"shuffle({mine}, 5)")), rows * 100 + 5 + 0 * lanes)
    assert torch.equal(run_there(put.format(f"shuffle_xor({mine}, 3)")), rows * 100 + (lanes ^ 3))
    assert torch.equal(
        run_there(put.format(f"shuffle_up({mine}, 2)")), rows * 100 + torch.where(lanes < 2, lanes, lanes - 2)
    )
    down = torch.where(lanes > 29, lanes, lanes + 2)
    assert torch.equal(run_there(put.format(f"shuffle_down({mine}, 2)")), rows * 100 + down)
    assert torch.equal(run_there(put.format("votes(lane() % 4 == 1)")), torch.full((3, 32), 0x22222222))
    assert torch.equal(run_there(put.format("sum_up_to(lane() + 1)")), (lanes + 1) * (lanes + 2) // 2 + 0 * rows)


def test_halves_of_a_wavefront_may_part():
    """A half that goes another way is counted by no ballot, and its lanes are read by no shuffle."""
    ways = "u32 x = group() % 2 ? votes(true) + shuffle(lane(), 3) : votes(lane() < 4) + 7;\n"
    rows = run(f"{ways} out[group() * 32 + lane()] = x + votes(true);", 9, WAVEFRONTS)
    odd, even = (-1 + 3 - 1), (15 + 7 - 1)
    assert torch.equal(rows[:, 0], torch.tensor([even, odd] * 4 + [even]))
    assert torch.equal(rows, rows[:, :1].expand(9, 32))


@pytest.mark.parametrize(
    "kernel",
    [
        "if (lane() < 7) votes(true);",
        "if (lane() == 3) return; votes(true);",
        "if (lane() % 2) shuffle(1, 0);\n else shuffle(1, 0);",
        "shuffle_xor(1, lane() < 9 ? 1 : 2);",
        "for (u32 i = 0; i < (lane() ? 2 : 3); ++i) votes(true);",
    ],
)
@every_wave
def test_lanes_that_part_at_an_exchange_are_found(kernel, launcher):
    with pytest.raises(AssertionError, match="lanes part at the exchange of line"):
        run(kernel, launcher=launcher)


def test_what_lanes_leave_in_memory_for_each_other_depends_on_the_group():
    """No device promises an order of lanes; the emulator has two, so that whoever relies on one is found out."""
    race = run("u32* row = out + group() * 32; row[lane()] = 1; row[lane()] = lane() ? row[lane() - 1] + 1 : 1;")
    assert not torch.equal(race[0], race[1])


UNDEFINED = """
import torch
from emulated import Emulator, emulated
from hpcllm.codecs import find_codec

checked = Emulator(32, ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"))
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
kinds = ("int8:256", FP32), ("int8:32:sr", BF16), ("int4:128", FP16), ("fp8:2048", FP32), ("bf16", FP32), ("mpc", BF16)
for name, dtype in (*kinds, ("exp", BF16), ("exp", FP32), ("zfp:8", FP32), ("zfp:13", BF16), ("zfp:32", FP32)):
    host, on_device = find_codec(name, dtype), emulated(name, dtype, checked)
    for n in (1, 3, 127, 129, 1021, 2500):
        for shift in (0, 1, 3):  # values, where a lane may take four at once, and where it may not
            values = torch.empty(n + shift, dtype=dtype)[shift:].copy_(torch.randn(n) * torch.logspace(-30, 30, n))
            data = on_device.encode(values, torch.empty(host.encoded_bytes(n), dtype=torch.uint8))
            out = torch.zeros(n + shift)[shift:]
            on_device.decode(data, out)
            on_device.decode_add(data, out)
            if hasattr(on_device, "sum_encode"):
                rows = torch.empty(3, (len(data) + 3) // 4 * 4, dtype=torch.uint8)
                rows[:, : len(data)] = data
                on_device.sum_encode(rows, 1, values, torch.empty_like(data))
print("defined")
"""


@pytest.mark.full(reason="compiles all kernels anew with a sanitizer, a fifth of a minute")
def test_kernels_do_nothing_that_c_leaves_undefined():
    """Shifts by too much, misaligned words, indices beyond arrays: whole groups, ragged ends, values at odd places."""
    done = subprocess.run([sys.executable, "-c", UNDEFINED], cwd=TESTS, capture_output=True, text=True, timeout=110)
    assert done.stdout == "defined\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"


def test_the_sanitizer_sees_a_misaligned_word():
    text = "from emulated import Emulator\nfrom test_emulator import run\nprint(run({!r}, 1, Emulator(32, {!r})))"
    options = ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    command = [sys.executable, "-c", text.format("*(u32*)((u8*)out + 2) = lane();", options)]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=110)
    assert done.returncode != 0
    assert "misaligned address" in done.stderr


GUARDED = """
import ctypes, mmap, sys
import torch
from emulated import emulated
from hpcllm.codecs import find_codec

libc = ctypes.CDLL(None, use_errno=True)

def at_the_edge(size):
    "Bytes between two pages that kill whoever reads them: they end where the second begins."
    page = mmap.PAGESIZE
    inner = -(-max(size, 1) // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    keep.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for edge in (start, start + page + inner):
        assert libc.mprotect(ctypes.c_void_p(edge), page, 0) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=page, count=inner)
    return whole[inner - size :]

for name in ("int8:256", "int8:32", "int4:128", "int4:64:sr", "fp8:2048", "bf16", "raw"):
    for dtype in (torch.float32, torch.bfloat16):
        host, on_device = find_codec(name, dtype), emulated(name, dtype)
        for n in (1, 2, 3, 31, 127, 128, 129, 511, 1021, 2047):
            keep = []
            size = on_device.encoded_bytes(n)
            values = at_the_edge(n * dtype.itemsize).view(dtype)
            values.copy_(torch.randn(n))
            data = on_device.encode(values, at_the_edge(size))
            rows = at_the_edge(3 * (size + 3 & ~3)).view(3, -1)
            rows[:, :size] = data
            on_device.decode(data, at_the_edge(4 * n).view(torch.float32))
            on_device.decode_add(data, at_the_edge(4 * n).view(torch.float32).zero_())
            on_device.sum_encode(rows, 1, values, at_the_edge(size))
print("inside")
"""


def test_kernels_read_and_write_nothing_outside_their_arrays():
    done = subprocess.run([sys.executable, "-c", GUARDED], cwd=TESTS, capture_output=True, text=True, timeout=110)
    assert done.stdout == "inside\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"


PRETEND = """
import torch
import pretend
from emulated import EMULATOR
from hpcllm.codecs import find_codec
from hpcllm.codecs.gpu.launch import LAUNCHERS, launcher_of

pretend.start()
device = torch.device("pretend")

def check(name):
    host, on_device = find_codec(name), find_codec(name, torch.float32, "pretend")
    values = torch.randn(1000)
    data = torch.empty(host.encoded_bytes(1000), dtype=torch.uint8)
    truth = host.encode(values, data)
    there = on_device.encode(values.to(device), torch.empty_like(data, device=device))
    assert there.device.type == "pretend" and torch.equal(there.cpu(), truth), name
    out, back = torch.zeros(1000, device=device), torch.zeros(1000)
    for decode in ("decode", "decode_add"):
        getattr(on_device, decode)(there, out)
        getattr(host, decode)(truth, back)
        assert torch.equal(out.cpu(), back), name

for name in ("raw", "bf16", "fp16", "int8:256"):
    check(name)
for name in ("int4:128", "int8:256:sr", "fp8:128", "exp", "zfp:8"):
    try:
        find_codec(name, torch.float32, "pretend")
    except ValueError as error:
        assert "pretend" in str(error) and "int8" in str(error), error
    else:
        raise AssertionError(name)
LAUNCHERS["pretend"] = lambda: EMULATOR
launcher_of.cache_clear()
find_codec.cache_clear()
for name in ("raw", "bf16", "int8:256", "int4:128", "int8:256:sr", "fp8:128", "exp", "mpc", "zfp:8"):
    check(name)
print("same")
"""


@pytest.mark.full(reason="emulates most codecs, a fifth of a minute; so do the tests on the pretended device")
def test_codecs_of_a_device_work_where_the_cpu_may_not_touch_their_memory():
    import pretend

    if pretend.why_not():
        pytest.skip(pretend.why_not())
    done = subprocess.run([sys.executable, "-c", PRETEND], cwd=TESTS, capture_output=True, text=True, timeout=110)
    assert done.stdout == "same\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"
