"""A run's state <-> one HDF5 file. A reading order:

slabs.py        boxes of global tensors, and where their bytes lie; plan.py: who writes or reads which block (pure)
layout.py       names, types, blocks, checksums and packed chunks of the file (pure but for numpy)
header.py       index at the front of the file, and its checksum; directory.py: everything but the tensors, checked
agreement.py    all ranks agree on a plan; exchange.py: parts of blocks travel between them
writer.py       all ranks write one file; file_layout.py: the file without its tensors
reader.py       any slab on any rank; restore.py: all ranks together, back into a run or a model
state.py        what a run keeps, as datasets and attributes; background.py: written while training goes on
folder.py       the checkpoints of one run, the newest sound one, and which are kept
inspect.py, diff.py, archive.py     the commands of `python -m hpcllm checkpoint`
huggingface/    weights from and for Hugging Face's formats
"""
