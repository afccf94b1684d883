"""AdamW for a device's memory: one pass over gradients, moments and weights, the weights of 16 bits included.

    fused_adamw.py    how the kernel is started; bytes and launches
    adamw.cu          the update of a value, in the memory of one share

One text serves NVIDIA, AMD and, in the tests, the CPU: compiled and started as codecs' kernels are (codecs/gpu). Where
there is no compiler, and on the CPU, PyTorch's fused kernel computes the same (optim/adamw.py).
"""
