"""Choose which rank runs in which slot of a node: count the traffic that crosses nodes, and find a better order.

    run file --traffic.py--> bytes a step over dp, over tp, between stages
    ranks, ranks a node, a package --slots.py--> slots;  order of the ranks --> which rank in which slot
                                                     |
    slots.py    the six mesh orders, blocks of every shape, exchanges --> least bytes between nodes, then packages
                                                     |
    said as     mesh.order (no file) | an option of srun | a rank order file of Cray MPICH

Pure: it starts no MPI and imports no torch, so it answers on a login node.
"""
