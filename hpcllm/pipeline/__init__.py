"""Schedules as data, and the engine that runs them. A reading order:

actions.py, placement.py   what a rank can do, and which part of the model it holds
orders.py                  in which order it works; posting.py: where messages stand; schedules.py: both, and as text
checker.py                 the proof that a schedule ends; clock.py, timing.py: how long it takes
engine.py                  one loop that runs any schedule; chunk.py: a virtual stage; link.py: its wires
trace.py, measured.py      what a step really did; explain.py: where its time went
command.py                 `python -m hpcllm schedule`; grid.py, picture.py, report.py, comparison.py: what it shows
"""
