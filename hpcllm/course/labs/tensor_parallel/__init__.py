"""Lab 5: a layer split over ranks. checks.py judges tensor_parallel.py, which `start` copies beside sheet.md.

decoder.py puts the student's functions into the decoder that training uses.
"""
