"""Weights from and for elsewhere: Hugging Face folders <-> our checkpoints. A reading order:

places.py         where a box of our parameter lies in a tensor of theirs; names.py: tables of names (both pure)
settings.py       a config.json, asked key by key; rope.py, descriptions.py: keys <-> our fields
architectures.py  which model a config.json says, and which of them says a model (all pure)
safetensors.py    the format of a file of tensors (pure)
contents.py       what a folder says that it holds, checked; folder.py: any box of it, on any rank
importing.py      folder -> checkpoint; exporting.py, texts.py: checkpoint -> folder; dtype.py: rounded on the way
convert.py        the command; start.py: a run that begins with the weights of either
"""
