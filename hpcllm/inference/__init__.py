"""Text from a trained model. Reading order:

generate.py        a checkpoint or Hugging Face folder and a prompt -> text, in one process
several_ranks.py   the same model shared by tp x pp ranks; the drawing of tokens is model/sampling.py
stages.py          hidden states from stage to stage
"""
