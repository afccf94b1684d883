"""Hardware of a node, read from /sys and /proc. Pure: neither torch nor MPI, and nothing is ever written.

sysfs.py          small files under a root, which a test may set to a folder of its own; "0-3,8" <-> numbers of cores
topology.py       cores, hardware threads, shared caches, NUMA domains and their distances
pci_devices.py    GPUs; Ethernet, InfiniBand, Slingshot
node.py           all of it as one value; memory, cgroups, huge pages, /dev/shm; the name of this node
"""
