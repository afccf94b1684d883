"""Checks whether an allocation is fit to run: `python -m hpcllm preflight`; the cheap part at each start of `train`.

facts.py       what is known of a rank, a node, the allocation (pure); collect.py finds it out and brings it to rank 0,
               facts of nodes that are alike once
findings.py    a fault: how bad, what, where, how to fix it, in the words of each launcher (pure)
checks.py      the list of all checks, a function a fault, over the facts alone (pure); those of cores and devices stand
               in placement.py
run_file.py    what one run file needs of this allocation
measurements   matrix.py, bandwidth.py, storage.py, codec_test.py
page.py        the page, with ranks, cores, devices and network cards as a tree (pure)
examination.py all of it, as the command runs it; and the part that train always runs
"""
