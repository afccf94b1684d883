"""Evaluation of a model. Reading order:

held_out.py       loss on held-out text and bits per byte, inside a training run
batches.py        requests and rows of a store -> batches; scoring.py: batches -> log-likelihoods, on any layout
examples.py       questions and answers as text; benchmarks.py, example_files.py: files of them
example_tokens.py examples and prompts -> tokens
problems.py       questions made with a seed, held out by construction
questions.py      questions that a model answers by writing; question_formats.py: files of them
generating.py     prompts -> texts, on any layout; patterns.py: what in a text is the answer
shots.py          examples with their answers in front of each question
tasks.py          what is measured by name, figures.py: with which uncertainty
code_tests.py     tests of programs, sandbox.py: where they run, judge_process.py: beside MPI; code_task.py: HumanEval
settings.py       what was asked for, what is known of a model; sharing.py: tokens for all ranks
store_task.py     token stores, by source
measuring.py      tasks, checked and measured by a model that is there; question_task.py: those that generate;
                  evaluate.py: by a model that it loads
"""
