"""Weights from and for elsewhere: Hugging Face folders <-> our checkpoints. A reading order:

tensor_map.py     where a box of our parameter lies in a tensor of theirs; tables of names (pure)
settings.py       a config.json, read key by key; architectures.py: its keys <-> our fields (both pure)
safetensors.py    the format of a file of tensors (pure)
folder.py         what a folder holds, checked; any box of it, on any rank
convert.py        the command, and folder -> checkpoint; export.py: checkpoint -> folder
few_bits.py       weights of 8 or 4 bits: their tensors and their key of config.json (pure); quantise.py: the command
start.py          a run that begins with the weights of either
base.py           the frozen weights below a run's adapters; merge.py: both as one model; peft.py: adapters <-> PEFT
"""
