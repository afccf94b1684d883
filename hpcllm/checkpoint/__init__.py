"""A run's state <-> one HDF5 file. A reading order:

slabs.py       who holds which box of a global tensor, and where its bytes lie (pure)
layout.py      names, types and checksums in the file; plan.py: what ranks agree on before they write
writer.py      all ranks write one file; guard.py: the checksum over all that is not tensor data
directory.py   what a file says it holds, checked; reader.py: any slab of it, on any rank
pieces.py      a rank's flat memory as slabs; state.py: what a run keeps; restore.py: back into a run, or a model alone
folder.py      the files of one run; inspect.py: one file shown to people
"""
