"""Schedules as data, and the engine that runs them. A reading order:

actions.py          the actions of a rank, the part of the model that it holds, the two ends of a message
orders.py           the order of each rank's work; clock.py: which work needs which, and when each piece runs
schedules.py        work and messages together, and as text; checker.py: the proof that a schedule ends
timing.py           how long a schedule takes; grid.py, picture.py, report.py: its drawing and its numbers
engine.py           one loop that runs any schedule; chunk.py: a virtual stage; link.py: its messages;
                    host_activations.py: what waits for a backward pass in host memory
trace.py            what a step really did, as a file; measured.py reads it back; explain.py: where its time went

All but engine, chunk, link, host_activations and trace import neither torch nor mpi4py.
"""
