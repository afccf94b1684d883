"""Objectives beside next-token prediction, which cli hands to the training loop (training/objective.py). Reading order:

preferences.py    DPO: the loss of pairs of answers, its figures, held-out pairs
reference.py      log-probabilities of the weights that the run began with, computed once, kept in the run folder
"""
