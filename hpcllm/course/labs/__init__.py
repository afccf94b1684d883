"""The labs, a folder each: checks.py, the file that a student fills in, sheet.md. lab.py says how one is added."""
