"""Lab 7: checkpoint and kill -9. checks.py judges checkpoint.py, which `start` copies beside sheet.md.

forked.py is a rank that asks before each call to the disk; scheduler.py answers, and may fail the call or kill the
rank; disk.py is what a loss of power leaves; bench.py and scenarios.py have the laws about all that, in a process of
their own; damage.py damaged files; resumed.py a training run that is ended and resumed; interval.py what a job loses to
failures; ours.py our own functions.
"""
