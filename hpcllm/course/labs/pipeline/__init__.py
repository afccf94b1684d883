"""Lab 4: pipeline schedules as data. checks.py judges pipeline.py, which `start` copies beside sheet.md."""
