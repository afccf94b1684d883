"""How long messages and collectives of a layout take on a machine. Pure.

topology.py                        which ranks of a group share packages, nodes, switches
library.py, own.py                 as NCCL and RCCL send, and as our collectives do
network.py                         both, by what they are for
"""
