"""Which layout is best. Pure.

space.py, constraints.py           which layouts there are, and which of them are asked for
bound.py                           what no layout can be faster than
search.py                          the best of them
reasons.py, what_if.py             why it wins, and what would help
"""
