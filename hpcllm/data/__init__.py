"""Text -> token store -> batches. Reading order:

prepare.py         the phases, top to bottom; each names the file that does it
  inputs.py        files and folders to read, shared among the ranks
  documents.py     one file -> documents in normal form, or named problems
  dedup.py         pass 1: digests, split keys, duplicates, and a sample for the tokenizer
  tokenizer.py     byte-level BPE, trained or loaded
  store_writer.py  pass 2: tokenize, spill, write one store by all ranks
  prepare_report.py  progress and closing table
store.py           the file format, checked and memory-mapped; a checked HDF5 file as checkpoints are
store_watch.py     checksums of what training reads; store_verify.py: of everything, on demand
sampler.py         position in the run -> sample
loader.py          samples of a step, read ahead and copied to the device
"""
