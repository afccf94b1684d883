"""From gradients to the next step's weights. A reading order:

flat.py           which parameters lie together in one flat array; sections.py: who sums it, and which stretch is ours
buckets.py        gradients kept whole (ZeRO 0 and 1); passing.py: of which a rank keeps its share (ZeRO 2 and 3)
summation.py      how one array is summed: over whom, by which codec
adamw.py          the update of one stretch; learning_rate.py; optimizer.py: all stretches of a rank
weights.py        how weights become equal again after each replica updated its share (ZeRO 1 and 2)
units.py          weights that are gathered for the time of their work only (ZeRO 3)
pieces.py         what a checkpoint keeps of all this; assembly.py: from a run file to these parts
"""
