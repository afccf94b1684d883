"""What each rank holds. Pure.

ledger.py, sizes.py                bytes that come and go; forward_pass.py, backward_pass.py: line by line, of one pass
moments.py                         when a schedule holds most
of_run.py                          the ranks of a run file: exact, for our trainer
own.py, megatron.py                the ranks of a layout, of our trainer and of Megatron-LM (megatron_passes.py)
stage_memory.py                    both, with what a device needs besides tensors
least.py                           what no layout is below
"""
