"""What a node is made of, read from /sys and /proc. Pure: neither torch nor MPI, and nothing is ever written.

sysfs.py      small files under a root, which a test may set to a folder of its own
lists.py      "0-3,8" <-> numbers of cores, n[1-3] <-> names of nodes, masks for a batch system
topology.py   cores, hardware threads, shared caches, NUMA domains and their distances
memory.py     of the node, of its cgroup, huge pages, /dev/shm
network.py    Ethernet, InfiniBand, Slingshot
devices.py    GPUs by their PCI address
node.py       all of it as one value, and the name of this node
"""
