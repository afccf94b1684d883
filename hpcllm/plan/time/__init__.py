"""Predict how long the work and the messages of a step take. Pure.

kernels.py                  the kernels of a pass: products, attention, streams of bytes
roofline.py                 seconds of a kernel on a device; kernel_times.py: where they were measured
topology.py, network.py     where the ranks of a group lie; messages and collectives of ours and of vendor libraries
passes.py                   passes of a microbatch, exchange with replicas, AdamW: all that a rank does
timeline.py                 the actions of the schedule, one after another; when they end at the earliest
calibration.py              measurements --> a machine file
"""
