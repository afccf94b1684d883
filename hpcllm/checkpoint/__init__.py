"""A run's state <-> one HDF5 file. A reading order:

slabs.py       who holds which box of a global tensor, and where its bytes lie; blocks.py: what is written as one (pure)
layout.py      names, types and checksums in the file; index.py: the text at its front that says what is in it (pure)
plan.py        who writes or reads which block (pure); exchange.py, messages.py: parts of blocks travel
writer.py      all ranks write one file; skeleton.py: the file without them; mpio.py: by HDF5; striping.py: Lustre
guard.py       the front of a file and its checksum; directory.py, regular.py: what a file says that it holds, checked
reader.py      any slab on any rank; fetch.py, tensors.py: all ranks together, into the memory of tensors
pieces.py      a rank's flat memory as slabs; facts.py, state.py, surplus.py: what a run keeps; restore.py: back into it
background.py  written while training goes on; folder.py, retention.py: the files of one run, and which stay
command.py     python -m hpcllm checkpoint: locate.py, shares.py, ahead.py: which file, which blocks, by a few threads
               inspect.py, verify.py, diff.py, diff_report.py, archive.py, packing.py (pure)
"""
