"""Fused kernels of the model for a device's memory: one pass over memory where PyTorch's own operations take several.

    fused.py             the operations, forward and backward, with their bytes and launches
    rows.cu              what kernels share that take a row (a token) a group, with
    cross_entropy.cuh    log of the sum of exp, and softmax minus one-hot in the memory of the logits
    rms_norm.cuh         RMSNorm, and the sum on the residual path in front of it
    rms_norm_rows.cuh    its backward pass in one, for rows that are not too long
    rotary.cu            queries and keys rotated together
    swiglu.cu            silu(gate) up

One text serves NVIDIA, AMD and, in the tests, the CPU: compiled and started as codecs' kernels are (codecs/gpu). Where
there is no compiler, and on the CPU, PyTorch's operations compute the same to rounding.
"""
