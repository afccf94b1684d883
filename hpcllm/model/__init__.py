"""The transformer, whole or one rank's part of it. A reading order:

shapes.py            names and global shapes of all parameters, and the shard of each that a tp rank holds (pure)
transformer.py       the decoder: embedding, norms, blocks, head; attention.py: the other part of a block
tensor_parallel.py   the messages between the ranks of one layer; linear.py: the layers that it splits
compiled.py          blocks by torch.compile, where a run asks for it
gradient_sums.py     gradients of weights, added where their sum lies
recompute.py         tensors that the backward pass makes again; loss.py: cross entropy, split or in pieces
eager.py             norms and rotary positions where no kernel of gpu/ is
initialisation.py    weights that do not depend on the layout
paged_cache.py       keys and values of many texts, in blocks; paged_attention.py: attention to them on CPUs
quantised.py         weights of 8 or 4 bits
token_pass.py        one more token of each text on CPUs, in one call: token_kernels.py, few_rows.py, tiles.py
sampling.py          the next token of each text of a batch, from its logits
"""
