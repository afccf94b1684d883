"""`python -m hpcllm.perf`: how fast are the collectives, the codecs and the links of this allocation?

__main__.py    the commands, in one table
arguments.py   command line -> Options, checked once          pure
limits.py      bus bandwidth, and what no algorithm can beat  pure
records.py     one measurement = one flat record; JSON        pure
table.py       records as text and as Markdown                pure
picture.py     records as curves
values.py      what is sent, and what must come out
timing.py      start together, repeat in turns, median
collective.py  allreduce, reduce_scatter, allgather, alltoall, broadcast
library.py     the same, by the MPI library alone: the baseline
check.py       is the result right?
p2p.py         two ranks
codec.py       one rank: encode and decode
report.py      where records go as they come
"""
