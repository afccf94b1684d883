"""How long the work of a step takes. Pure.

kernels.py                         what a pass of a microbatch runs: products, attention, streams of bytes
families.py, roofline.py           seconds of a kernel on a device; kernel_times.py: where they were measured
passes.py                          a forward and a backward pass, with the collectives inside layers
data_parallel.py                   what replicas exchange, and what of it work hides
timeline.py                        the actions of the schedule, one after another
calibration.py                     measurements --> a machine file
"""
