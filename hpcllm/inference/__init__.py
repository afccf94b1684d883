"""Texts from a trained model. Reading order:

generate.py        a checkpoint or Hugging Face folder and prompts -> texts
complete.py        tokens of many prompts -> tokens of their texts, on one process or on dp x pp x tp ranks
batch.py           which texts are made at once, and which wait; endings.py: where a text ends
cached_model.py    one pass of a model; the cache is model/paged_cache.py, the draws are model/sampling.py
prompt_files.py    prompts from files, completions as lines of JSON
several_ranks.py   one pass of a model that tp x pp ranks share; stages.py: hidden states from stage to stage
"""
