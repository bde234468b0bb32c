"""Checks a function of one's own for a column of a variant, before any weight is loaded."""

from collections.abc import Callable
import os
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages

_SHAPE = 2, 3  # [B,T] of the arrays that it is tried on


def check(column: str, function: Callable, variant: Any) -> str:
  """Returns what is wrong with a variant's 'advantage', 'surrogate' or 'divisor'; '' if nothing.

  Compiles as a run does, for shapes alone. An advantage is computed twice besides, on random
  numbers with other values, because one that reads them needs a critic.
  """
  try:
    return _CHECKS[column](function, variant)
  except Exception as error:  # whatever a user's function may raise
    frames = traceback.extract_tb(error.__traceback__)
    others = ('site-packages', os.path.dirname(types.__file__))
    own = [frame for frame in frames if not any(part in frame.filename for part in others)]
    frame = (own or frames)[-1]
    line = str(error).strip().partition('\n')[0]
    return f'it raised {type(error).__name__}: {line} ({frame.filename}:{frame.lineno})'


def _advantage(function, variant):
  estimator = advantages.estimator(function)
  estimate = lambda batch: estimator(batch, variant)
  wrong = _expect(jax.eval_shape(estimate, _batch(0)), ('advantages', 'returns'))
  if wrong or estimator.needs_critic:
    return wrong
  first, second = (jax.tree.leaves(estimate(_batch(seed))) for seed in (0, 1))
  if all(np.array_equal(x, y) for x, y in zip(first, second)):
    return ''
  return 'it reads old_values, and no critic is trained for it: wrap it in advantages.from_values'


def _surrogate(function, variant):
  x = jnp.zeros(_SHAPE)
  made = jax.eval_shape(lambda *args: function(*args, variant), x, x, x)
  return _expect(made, ('objective', 'clipped'))


def _divisor(function, variant):
  del variant
  made = jax.eval_shape(function, jnp.float32(1), jnp.float32(1), jnp.bool_(True))
  if getattr(made, 'shape', None) == ():
    return ''
  return f'it has to return one number, and returned {_described(made)}'


def _expect(made, names):
  """Returns '' if `made` is an array of _SHAPE for each name."""
  whole = isinstance(made, tuple) and len(made) == len(names)
  if whole and all(getattr(x, 'shape', None) == _SHAPE for x in made):
    return ''
  return f'it has to return ({", ".join(names)}), each [B,T], and returned {_described(made)}'


def _described(made):
  shape = lambda x: str(list(x.shape)) if hasattr(x, 'shape') else type(x).__name__
  if isinstance(made, tuple):
    return f'({", ".join(map(shape, made))}) for B, T = {_SHAPE}'
  return f'{shape(made)} for B, T = {_SHAPE}'


def _batch(seed):
  """Returns a batch of random numbers; of another seed only `old_values` differ."""
  random = np.random.default_rng(7)
  draw = lambda: jnp.asarray(random.normal(size=_SHAPE), jnp.float32)
  columns = ('rewards', 'old_logp', 'ref_logp', 'advantages', 'returns', 'behaviour_logp')
  turn_ids = jnp.asarray([[0, 1, 1], [1, 0, 2]], jnp.int32)
  values = np.random.default_rng(seed).normal(size=_SHAPE)
  return types.TurnBatch(
      tokens=jnp.ones(_SHAPE, jnp.int32),
      action_mask=(turn_ids > 0).astype(jnp.float32),
      turn_ids=turn_ids,
      old_values=jnp.asarray(values, jnp.float32),
      group_ids=jnp.zeros(_SHAPE[0], jnp.int32),
      truncated=jnp.zeros(_SHAPE[0]),
      **{name: draw() for name in columns},
  )


_CHECKS = {'advantage': _advantage, 'surrogate': _surrogate, 'divisor': _divisor}
