"""What a run will take, before it is started. Pure: no torch, no MPI.

ledger.py                          bytes that come and go; sizes.py: of which tensors
forward_pass.py, backward_pass.py  what one pass of a microbatch takes and keeps
memory.py                          what each rank of a run holds; command.py: `python -m hpcllm memory`
"""
