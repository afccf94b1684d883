"""Lab 8: time and memory of layouts by hand. checks.py judges planner.py, which `start` copies beside sheet.md.

given.py has what functions take; ours.py the formulas and what mistakes make of them; published.py and measured.py hold
the student's formula against runs of others, and against one of our own. published.toml: rows of papers.
"""
