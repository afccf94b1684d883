"""The run file and other data that users write: checked here, trusted everywhere else. Pure: neither torch nor mpi4py.

schema.py     every key of a run file, its default and its reason
rules.py      what a single value may be
policies.py   which codec each kind of traffic takes
presets/      shapes of known models           machines/   numbers of known supercomputers
"""
