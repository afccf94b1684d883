"""Tensor memory <-> MPI messages. To be read: buffers, memory, marks; gpu_aware, gpu_aware_trial.

buffers is the one place where tensors meet MPI. The rest is for those of a device: where their messages lie, and in
which order its stream and MPI touch them.
"""
