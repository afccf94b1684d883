"""Is this allocation fit to run? `python -m hpcllm preflight`, and the cheap part of it at the start of `train`.

facts.py       what one rank, one node, the allocation is found to be (pure); collect.py asks this process and node,
gather.py      brings it to rank 0: nodes that are alike send it once
findings.py    what is wrong: how bad, what, where, how to mend it (pure); mends.py: the options of each launcher
checks: placement.py (cores), devices.py, messages.py (MPI and network), nodes.py, software.py: a function a fault, over
               the facts alone (pure); checks.py has the list of them
run_file.py    what one run file asks of this allocation
measurements:  matrix.py, bandwidth.py, storage.py, codecs.py, load.py; rounds.py, outliers.py: whom to compare (pure)
drawing.py     ranks, cores, devices, NICs as a tree; page.py: the page (pure)
start.py       the part that train always runs; command.py: the command
"""
