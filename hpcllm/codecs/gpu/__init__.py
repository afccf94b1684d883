"""Codecs for arrays in a device's memory. Same names, same bytes as on the CPU; catalogue.py says which exist where.

    catalogue.py                      the twin of a CPU's codec
    launch.py, binaries.py            how a kernel is started; how it is compiled
    common.cuh                        what all kernels use: numbers as bits, groups of 32 lanes, quads of values
    quantise.cu, blocks.py            int8, int4, fp8            casts.cu, casts.py    raw, bf16, fp16
    exponent.cu, mpc.cu, streams.*    exp, mpc                   zfp.cu, zfp.py        zfp
    plain.py                          int8 by torch's operations, for devices that kernels cannot be compiled for

One text serves NVIDIA, AMD and, in the tests, the CPU (tests/emulated): nothing in it names a vendor but common.cuh.
"""
