"""Lab 3: a lossy codec and what it is worth. checks.py judges codec.py, which `start` copies beside sheet.md.

ours.py is our codec in the lab's format; diagnosis.py tells mistakes by their bytes; summed.py sums by the codec, on
slow links too.
"""
