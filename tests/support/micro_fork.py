"""Imported by a fork server before it forks children for `micro_run`, and nowhere else."""

import sys
import types

# bm25s runs JAX as it is imported, and a JAX that has run does not survive a fork.
sys.modules['stppo_jax.retrieval.bm25'] = types.ModuleType('bm25')
