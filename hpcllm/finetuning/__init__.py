"""Objectives beside next-token prediction, which cli hands to the training loop (training/objective.py). Reading order:

objectives.py      finetuning.kind -> its objective
preferences.py     DPO: the loss of pairs of answers, its figures, held-out pairs
reference.py       log-probabilities of the weights that the run began with, computed once, kept in the run folder
grpo.py            GRPO: a step from prompts to losses; policy_loss.py: the loss and its figures
rollouts.py        prompts, and the texts that the model writes after them, on the ranks of the run
reward_process.py  a function of the user that rewards texts, in a process of its own; reward_child.py: that process
"""
