"""The transformer, whole or one rank's part of it. A reading order:

shapes.py            names and global shapes of all parameters; shards.py: which part of each a tp rank has (pure)
transformer.py       the decoder: embedding, blocks, head; attention.py, rotary.py, layers.py: what a block is made of
tensor_parallel.py   what travels between the ranks of one layer; linear.py: the layers that it splits
recompute.py         what the backward pass makes again; loss.py: cross entropy, split or in pieces
initialisation.py    weights that do not depend on the layout
presence.py          when a unit's weights must be there, for an optimizer that shares them out
sampling.py          text from a decoder; cache.py: keys and values of the tokens so far
"""
