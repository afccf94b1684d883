"""A course of labs that grade themselves: a student replaces one function of the trainer, the machine judges it.

lab.py        a lab as data: laws, races, predictions, hints; says how a lab is added
catalogue.py  the labs by number and name; labs/NAME/: checks, the file to fill in, the sheet
watched.py    a communicator that is late, never buffers, and counts
ranks.py      what each rank of a check runs; student_file.py: the file, loaded within limits
untouched.py  has the file replaced a function of the grader?
runner.py     watches the ranks; launch.py: how they are started; processes.py: how all that was started ends
turns.py      times of a race, by turns
score.py      points, hints, text, JSON; picture.py draws; __main__.py: list, start, check, grade, demo
"""
