"""Which rank sits where: what of a step's traffic crosses nodes and packages, and how to seat the ranks better.

    run file --traffic.py--> bytes a step over dp, over tp, between stages
    ranks, ranks a node, a package --seats.py--> slots;  order of the ranks --> who sits in which slot
                                                     |
    search.py   the six mesh orders, blocks of every shape, exchanges --> least bytes between nodes, then packages
                                                     |
    said as     mesh.order (no file) | an option of srun (distribution.py) | a rank order file (order_file.py)

Pure: it starts no MPI and imports no torch, so it answers on a login node.
"""
