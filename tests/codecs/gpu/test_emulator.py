"""The emulator of device kernels finds what a device would not show, and kernels stay inside their arrays."""

from __future__ import annotations

import signal
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
EMULATED = "emulates every kernel for up to two minutes"
LIMIT_S = 400  # of that, where nothing is compiled yet and other tests run beside it


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
import sys
import torch
from emulated import Emulator, emulated, on_the_cpu
from emulated.every_kernel import start_codec, start_model, start_rotary, start_update

checked = Emulator(int(sys.argv[1]), ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"))
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
kinds = ("int8:256", FP32), ("int8:32:sr", BF16), ("int4:128", FP16), ("fp8:2048", FP32), ("bf16", FP32), ("mpc", BF16)
for name, dtype in (*kinds, ("exp", BF16), ("exp", FP32), ("zfp:8", FP32), ("zfp:13", BF16), ("zfp:32", FP32)):
    for n in (1, 3, 127, 129, 1021, 2500):
        for shift in (0, 1, 3):
            start_codec(emulated(name, dtype, checked), n, shift)
with on_the_cpu(checked):
    for dtype, shift in ((FP32, 0), (FP32, 1), (BF16, 0), (BF16, 3), (FP16, 1)):
        for rows, width in ((1, 1), (3, 130), (66, 12), (2, 1024), (1, 2051)):
            start_model(dtype, rows, width, shift)
        for n in (1, 255, 1024):
            start_update(checked, dtype, n, shift)
        for channels, rotated in ((16, 16), (32, 8), (6, 2)):
            start_rotary(dtype, 5, channels, rotated, shift)
print("defined")
"""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.full(reason=EMULATED)
@pytest.mark.parametrize("lanes", ["32", "64"])
def test_kernels_do_nothing_that_c_leaves_undefined(lanes):
    """Shifts by too much, misaligned words, indices beyond arrays: whole groups, ragged ends, values at odd places."""
    command = [sys.executable, "-c", UNDEFINED, lanes]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S)
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
import sys
import torch
from emulated import emulated, on_the_cpu
from emulated.every_kernel import start_codec, start_model, start_rotary, start_update
from emulated.guarded import Guarded

guarded = Guarded(int(sys.argv[1]))
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
names = ("int8:256", "int8:32", "int4:128", "int4:64:sr", "fp8:2048", "bf16", "raw", "exp", "mpc")
for name, dtype in (*((name, dtype) for name in names for dtype in (FP32, BF16)), ("zfp:8", FP32), ("zfp:13", BF16)):
    for n in (1, 2, 3, 31, 127, 128, 129, 511, 1021, 2047, 2048):
        start_codec(emulated(name, dtype, guarded), n)
with on_the_cpu(guarded):
    for dtype in (FP32, BF16, FP16):
        for rows, width in ((1, 1), (3, 5), (2, 129), (5, 128), (66, 12), (2, 1021), (3, 512), (2, 2052)):
            start_model(dtype, rows, width)
        for n in (1, 3, 255, 256, 1021, 1024):
            start_update(guarded, dtype, n)
        for channels, rotated in ((16, 16), (32, 8), (6, 2)):
            start_rotary(dtype, 7, channels, rotated)
print("inside")
"""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("lanes", ["32", pytest.param("64", marks=pytest.mark.full(reason=EMULATED))])
def test_kernels_read_and_write_nothing_outside_their_arrays(lanes):
    command = [sys.executable, "-c", GUARDED, lanes]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "inside\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("place", ["-1", "96"])
def test_a_word_beside_an_array_is_seen(place):
    text = "from emulated.guarded import Guarded\nfrom test_emulator import run\nprint(run({!r}, 3, Guarded(32)).sum())"
    command = [sys.executable, "-c", text.format(f"if (lane() == 0) out[{place}] = 1;")]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=110)
    assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr


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


@pytest.mark.full(reason="emulates most codecs, up to a minute; so do the tests on the pretended device")
def test_codecs_of_a_device_work_where_the_cpu_may_not_touch_their_memory():
    import pretend

    if pretend.why_not():
        pytest.skip(pretend.why_not())
    done = subprocess.run([sys.executable, "-c", PRETEND], cwd=TESTS, capture_output=True, text=True, timeout=110)
    assert done.stdout == "same\n", f"exit code {done.returncode}: {done.stderr[-2000:]}"
