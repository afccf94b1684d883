"""The machine below a run: nodes, devices, the batch system, the launcher, energy.

hardware/                        hardware of a node, read from /sys and /proc
device.py, device_setup.py       which device a rank takes, and how it is set up
affinity.py                      which cores a rank takes
job.py, slurm.py                 how a job starts, is told to stop, and ends; the batch system
energy/                          joules that a run has drawn
host_memory.py                   pinned memory beside a device
text.py, raw_files.py            text for people; HDF5 datasets that any process can fill
"""
