"""Rates to decide by where none were measured: of a core, its memory, its codecs, and the wire between nodes. Pure.

    wire between nodes   what the network interfaces of rank 0's node say of themselves, else 10 Gbit/s
    codec                its table below, at most what a core gets of its node's memory while the others work, too
    ratio                by the codec's name; of exp and mpc as gradients give it

    time of raw over that with the codec, 64 MiB of fp32 between two hosts of one rank, as predicted and as measured

    GB/s of the wire     .125            1.25            12.5
    int8                 3.7, 3.9        1.6, 1.9         .4       must win by 5 % (selection.py)
    exp                  1.16, 1.17       .9,  .7         .3
    zfp:8                 .6, 1.0         .1,  .3         .0

They tell a codec that pays from one that costs several times what it saves; a few per cent are beyond them. The wire
that is assumed is the one where the policies' codecs differ most: a faster one would take int8 from clusters with
Ethernet, a slower one would run exp and zfp where each call takes longer for it. What it gives away is exp on 1 Gbit/s;
`perf tune` gives that back, as it does whatever else is wrong here.
"""

from __future__ import annotations

from hpcllm.codecs.names import parse_name
from hpcllm.collectives.tuning import VALUE_BITS, Coding, Link, Rates, nominal_ratio

WIRE_GB_S = 1.25  # each way of a node, where no interface says its speed
MEMORY_GB_S = 7.0  # of a core, the node's others at work: of arrays far larger than caches
NEAR_GB_S = 5.0
# encode, decode: GB/s of fp32 by one core, in arrays of 4 MiB that caches hold; AMD EPYC, 2 virtual cores, 1 thread
CODEC_GB_S = {
    "bf16": (24.0, 37.0),
    "fp16": (29.0, 46.0),
    "fp8": (11.0, 26.0),
    "int8": (26.0, 44.0),
    "int4": (21.0, 23.0),
    "exp": (2.5, 4.5),
    "mpc": (1.8, 1.8),
    "zfp": (0.25, 0.2),
}
STOCHASTIC = 0.45  # factor on encoding: random numbers


def assumed_rates(codec: str, dtype: str, wire_gb_s: float | None) -> Rates:
    """Return rates for raw and for one codec. wire_gb_s: each way of a node; None: not known.

    Of bytes alone: messages cost nothing here. They tell algorithms apart, and raw values may take another one than a
    codec's; below what selection.codec_bytes says they decide alone, and no codec is taken.
    """
    near = Link(0.0, NEAR_GB_S)
    return Rates(
        near=near,
        far=Link(0.0, wire_gb_s or WIRE_GB_S),
        window=near,
        call_s=0.0,
        setup_s=0.0,
        message_s=0.0,
        copy_gb_s=MEMORY_GB_S,
        memory_gb_s=MEMORY_GB_S,
        codings={(name, dtype): assumed_coding(name, dtype) for name in ("raw", codec)},
    )


def assumed_coding(codec: str, dtype: str) -> Coding:
    """Return ratio and rates of a codec. Raises ValueError if there is no such codec."""
    name = parse_name(codec)
    if name.kind == "raw":
        return Coding("raw", 1.0, MEMORY_GB_S, MEMORY_GB_S, MEMORY_GB_S)
    encode, decode = CODEC_GB_S[name.kind]
    share = VALUE_BITS[dtype] / 32  # a value takes as long, however short it is
    encode_gb_s = min(MEMORY_GB_S, encode * share * (STOCHASTIC if name.stochastic else 1.0))
    decode_gb_s = min(MEMORY_GB_S, decode * share)
    return Coding(codec, nominal_ratio(codec, dtype), encode_gb_s, decode_gb_s, decode_gb_s)
