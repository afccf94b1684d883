"""Codecs for arrays in a device's memory. Same names, same bytes as on the CPU; codecs/catalogue.py chooses.

(Of a value that is no number, bf16, fp16 and sums only promise that it stays none: see codecs/protocol.py.)

    compiler.py         from text to machine code, once on a node
    launch.py           how a kernel is started
    device_codecs.py    raw, bf16, fp16, int8, int4, fp8, zfp, exp, mpc with the kernels of
    common.cuh          what all kernels use: numbers as bits, groups of 32 lanes, quads of values
    casts.cu, quantise.cu, mpc.cu, zfp.cu with zfp_blocks.cuh,
    exponent.cu with exponent_encode.cuh and exponent_decode.cuh, tiles.cuh
    torch_int8.py       int8 by torch's operations, for devices that kernels cannot be compiled for

One text serves NVIDIA, AMD and, in the tests, the CPU (tests/emulated): nothing in it names a vendor but common.cuh.
"""
