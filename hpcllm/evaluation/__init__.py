"""Evaluation of a model. Reading order:

held_out.py      loss on held-out text and bits per byte, inside a training run
batches.py       requests and rows of a store -> batches; scoring.py: batches -> log-likelihoods, on any layout
examples.py      questions and answers as text -> requests; benchmarks.py, example_files.py: files of them
problems.py      questions made with a seed, held out by construction
tasks.py         what is measured by name, figures.py: with which uncertainty
measuring.py     tasks, checked and measured by a model that is there; evaluate.py: by one that it loads
"""
