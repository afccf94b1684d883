"""`python -m hpcllm plan` and `python -m hpcllm memory`. Pure.

plan_arguments.py, question.py     what is asked; plan_command.py answers
report.py, ranking.py, facts.py    one layout, many, and the same as JSON
explain.py, arithmetic.py          a row, number by number
picture.py, written.py             as pictures, and as a run file
planned.py, memory_command.py      a run file for so many ranks, and what they hold
"""
