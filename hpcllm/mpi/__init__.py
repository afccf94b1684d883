"""Ranks, and what is between them: the mesh, messages of host and device memory, waits that have a limit.

This file imports nothing, so that pure code can use mesh_axes.py and partition.py without loading MPI.

mesh_axes.py, partition.py              sizes and coordinates of the mesh; how an array is cut. Pure
mesh.py, rank_names.py                  communicators; names of ranks in messages, pure
wait.py, watchdog.py                    every wait has a name and a limit; the report of a job that stands still
collective_errors.py                    what fails on one rank is raised on all
buffers.py, message_memory.py           how tensors, also of devices, become messages
gpu_aware.py, gpu_aware_marker.py       can MPI read a device's memory?
clock_sync.py                           clocks of different nodes, for traces
"""
