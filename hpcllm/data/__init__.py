"""Text -> token store -> batches. Reading order:

prepare.py         the phases, top to bottom; each names the file that does it
  inputs.py        files and folders to read, shared among the ranks
  documents.py     one file -> documents in normal form, or named problems
  chat.py          rows of chats -> documents with a loss mask; by a template of chat_template.py, which
                   chat_rendering.py renders
  dedup.py         pass 1: digests, split keys, duplicates, and a sample for the tokenizer
  tokenizer.py     byte-level BPE, trained or loaded
  store_writer.py  pass 2: tokenize, spill (token_spill.py), write one store by all ranks
  prepare_report.py  progress and closing table
model_texts.py     tokenizer and chat template that lie beside weights, and whether a store fits them
store.py           the file format, checked and memory-mapped; a checked HDF5 file as checkpoints are
store_watch.py     checksums of what training reads; store_verify.py: of everything, on demand
sampler.py         position in the run -> sample
packing.py         rows of samples: the stream, or whole documents by best fit
loader.py          samples of a step, read ahead and copied to the device
"""
