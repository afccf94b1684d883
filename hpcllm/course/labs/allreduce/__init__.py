"""Lab 2: a sum over all ranks. checks.py judges allreduce.py, which `start` copies beside sheet.md."""
