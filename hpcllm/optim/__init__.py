"""Gradients become the next step's weights. A reading order:

flat_buffers.py      which parameters lie together in one flat buffer, and ranges of it (pure)
shard_spec.py        a buffer as one rank sees it: which range it owns; gradient_reduce.py: how it is summed, over whom
buckets.py           gradients kept whole (up to ZeRO-1), or only this rank's share of them (from ZeRO-2 on)
adamw.py             the update of one share, its learning rate; host_states.py: states that rest in host memory
weights.py           how weights become equal again after each replica has updated its share (ZeRO-1, ZeRO-2), or
                     are gathered only while they are used (ZeRO-3)
optimizer.py         from a run file to these parts; replica_check.py: are the replicas still equal?
"""
