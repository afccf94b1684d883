"""`python -m hpcllm.perf`: how fast are the collectives, the codecs, the links and the steps of this allocation?

__main__.py      the commands, in one table
arguments.py     command line -> Options, checked once                             pure
records.py       one measurement = one flat record; JSON, tables, physical bounds  pure
picture.py       records as curves
timing.py        start together, repeat in turns, median
values.py        what is sent, what must come out, is the result right?
arrays.py        the arrays of an operation and the calls on them; the MPI library alone as the baseline
session.py       the allocation and its devices; where records go as they come
collective.py    allreduce, reduce_scatter, allgather, alltoall, broadcast
p2p.py codec.py  two ranks; one rank: encode and decode
step.py          whole training steps; with calibrate.py and kernels.py what the planner needs to know
tune.py          what `auto` needs to know of this allocation
"""
