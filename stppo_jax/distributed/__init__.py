"""Several processes of one run, and what has to be set before JAX starts.

hosts.py        the processes of a run: start, the one that writes, exchange of host data
messages.py     their messages, through the store of jax.distributed
determinism.py  deterministic operations on GPUs
xla_flags.py    which flags the installed jaxlib takes
malloc.py       memory in pages of 2 MB, and few arenas
"""
