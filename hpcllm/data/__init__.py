"""Text -> token store -> batches. A reading order:

prepare.py      the phases, top to bottom; each names the file that does it
  inputs.py     what there is to read, shared among the ranks
  documents.py  one file -> documents or named problems; normal.py: their normal form, digest and split
  census.py     pass 1; exchange.py and sample.py: what ranks find out together
  tokenizer.py  byte-level BPE, trained or loaded
  spool.py      pass 2; writer.py: all ranks write one store
  report.py     what `prepare` says
store.py        the file format, checked and memory-mapped
sampler.py      position in the run -> sample
"""
