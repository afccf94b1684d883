"""Registers of a lane that kernels took when this table was made: the most of all programs of a text, by target.

By NVRTC 13.5, for gfx90a by hipRTC 5.2.3, for gfx942 by clang 19. Devices allot registers by 8, so as many more are let
pass, for other versions. NVIDIA: of 65,536 on a multiprocessor, so that with 128 there stay 4 blocks of 128 threads.
AMD: vector registers, 512 for all wavefronts of a SIMD, so that with 64 there stay 8, with 128 4. `backward_rows` is
counted for rows of 2048 values, whose sums its lanes keep: few groups, which load far ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SLACK = 8
TABLE = """
kernel                     sm_75 sm_80 sm_90 sm_100 gfx90a gfx942
casts.sum_encode              47    46    42     48     78     81
quantise.encode               56    54    54     50     65     64
quantise.sum_encode           59    55    54     64    108    122
quantise.decode               30    29    28     30     29     37
quantise.decode_add           34    32    32     31     47     53
exponent.measure             113   112    80     80     70     71
exponent.write                44    40    32     32     62     61
exponent.locate               13    16    16     16      9      9
exponent.read                 56    54    55     56     62     62
exponent.read_floats          58    56    56     56     64     62
exponent.read_add             61    59    55     56     66     62
mpc.measure                   34    32    32     32     26     25
mpc.write                     36    38    40     40     30     32
mpc.locate                    14    16    16     16     11      9
mpc.read                      34    32    40     44     34     32
mpc.read_floats               34    32    40     44     34     32
mpc.read_add                  34    34    40     44     34     32
zfp.encode                    22    20    20     21     15     19
zfp.decode                    24    24    23     24     16     16
zfp.decode_floats             24    24    23     24     16     16
zfp.decode_add                24    23    23     24     16     16
cross_entropy.statistics      60    40    40     40     47     39
cross_entropy.gradient        69    70    64     56     69     95
rms_norm.forward              27    31    30     32     33     33
rms_norm.backward             38    40    40     43     66     44
rms_norm.weight_gradient      62    36    40     44     58     60
rms_norm.add_parts            35    32    40     52     36     50
rms_norm.backward_rows       168   168   156    128    239    266
rotary.rotary                 50    48    48     48     62     63
swiglu.forward                33    32    32     38     34     40
swiglu.backward               44    38    40     40     50     53
adamw.update                  72    72    72     70     98     75
"""


def most_registers(names: Iterable[Sequence[str]], answers: Iterable[dict[str, Any]]) -> dict[str, int]:
    """{text.kernel: most registers}, of the names of each program's texts and what a compiler's script says of it."""
    most: dict[str, int] = {}
    for (source, *parts), answer in zip(names, answers, strict=True):
        text = parts[0] if source == "rows.cu" else source  # it has no kernel but those of its part
        for kernel, takes in answer["kernels"].items():
            name = f"{text.split('.')[0]}.{kernel}"
            most[name] = max(most.get(name, 0), takes["registers"])
    return most


def expected(target: str) -> dict[str, int]:
    """{text.kernel: registers} of a column of the table."""
    (_, *targets), *rows = map(str.split, TABLE.strip().splitlines())
    return {name: int(counts[targets.index(target)]) for name, *counts in rows}
