"""A training run from its first line to its closing table. Reading order:

loop.py                                   start with it: what happens in a run, top to bottom
step.py                                   one step: passes, agreement of all ranks, update
setup.py                                  a run file -> RunContext, everything that one rank trains with
run_lock.py, resume.py, compatibility.py  the run folder: one job at a time, goes on from its newest checkpoint
finished.py                               the record that the last step is saved
requests.py                               when to save and when to stop; the time limit
saving.py                                 checkpoints, written behind the training
log.py, run_info.py, memory.py, summary.py    what a run prints and logs
step_timer.py, accounting.py              seconds, joules and hours of a start
"""
