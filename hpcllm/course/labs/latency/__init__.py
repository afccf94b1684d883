"""Lab 1: latency and bandwidth. checks.py judges latency.py, which `start` copies beside sheet.md."""
