"""Predict what each rank holds. Pure.

sizes.py                           sizes of a microbatch's tensors; a ledger of bytes that come and go
forward_pass.py, backward_pass.py  the bytes of one pass, line by line
peak_points.py                     the points of a schedule at which a rank may hold most
predict.py                         ranks of a run file or of a layout of our trainer: exact; and a lower bound
megatron.py                        ranks of a layout of Megatron-LM and its kin
stage_memory.py                    both, with what a device needs besides tensors
"""
