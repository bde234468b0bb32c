"""What a fork server imports before it forks children for `micro_run`; never import it
elsewhere."""

import sys
import types

# bm25s runs JAX as it is imported, and a JAX that has run does not survive a fork.
sys.modules['stppo_jax.retrieval.bm25'] = types.ModuleType('bm25')
