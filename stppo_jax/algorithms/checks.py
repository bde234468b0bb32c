"""Checks a function of one's own for a column of a variant, before any weight is loaded."""

from collections.abc import Callable
import functools
import os
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.algorithms import advantages

_GROUPS, _T = 2, 3  # of the arrays that it is tried on, [_GROUPS * group_size, _T]


def check(column: str, function: Callable, variant: Any, group_size: int = 1) -> str:
  """Returns what is wrong with the function of a column of variants.BUILT_IN; '' if nothing.

  Traces it as a run does, for shapes alone. An advantage is computed twice besides, on random
  numbers with other values, because one that reads them needs a critic.
  """
  try:
    return _CHECKS[column](function, variant, group_size)
  except Exception as error:  # whatever a user's function may raise
    frames = traceback.extract_tb(error.__traceback__)
    others = ('site-packages', os.path.dirname(types.__file__))
    own = [frame for frame in frames if not any(part in frame.filename for part in others)]
    where = f' ({own[-1].filename}:{own[-1].lineno})' if own else ''  # else the call did not fit
    line = str(error).strip().partition('\n')[0]
    return f'it raised {type(error).__name__}: {line}{where}'


def _advantage(function, variant, group_size):
  estimator = advantages.estimator(function)
  estimate = functools.partial(estimator, variant=variant)
  batches = [_batch(group_size, seed) for seed in (0, 1)]
  shape = batches[0].rewards.shape
  wrong = _expect(jax.eval_shape(estimate, batches[0]), ('advantages', 'returns'), shape)
  if wrong or estimator.needs_critic:
    return wrong
  first, second = (estimate(batch) for batch in batches)
  if all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, second)):
    return ''
  return 'it reads old_values, and no critic is trained for it: wrap it in advantages.from_values'


def _ratio(function, variant, group_size):
  batch = _batch(group_size, 0)
  made = jax.eval_shape(lambda batch: function(batch, variant), batch)
  shape = batch.rewards.shape
  if getattr(made, 'shape', None) == shape and jnp.issubdtype(made.dtype, jnp.integer):
    return ''
  kind = f'{made.dtype} ' if hasattr(made, 'dtype') else ''
  return (
      f'it has to return integers [B,T], and returned {kind}{_described(made)} for '
      f'[B,T] = {list(shape)}'
  )


def _surrogate(function, variant, group_size):
  x = jnp.zeros((_GROUPS * group_size, _T))
  made = jax.eval_shape(lambda *args: function(*args, variant), x, x, x)
  return _expect(made, ('objective', 'clipped'), x.shape)


def _divisor(function, variant, group_size):
  del variant, group_size
  made = jax.eval_shape(function, jnp.float32(1), jnp.float32(1), jnp.bool_(True))
  if getattr(made, 'shape', None) == ():
    return ''
  return f'it has to return one number, and returned {_described(made)}'


def _expect(made, names, shape):
  """Returns '' if `made` is an array of the shape for each name."""
  whole = isinstance(made, tuple) and len(made) == len(names)
  if whole and all(getattr(x, 'shape', None) == shape for x in made):
    return ''
  return (
      f'it has to return ({", ".join(names)}), each [B,T], and returned {_described(made)} for '
      f'[B,T] = {list(shape)}'
  )


def _described(made):
  if isinstance(made, tuple):
    return f'({", ".join(map(_described, made))})'
  return str(list(made.shape)) if hasattr(made, 'shape') else type(made).__name__


def _batch(group_size, seed):
  """Returns a batch of random numbers; of another seed only `old_values` differ."""
  rows = _GROUPS * group_size
  drawn = np.random.default_rng(7).normal(size=(6, rows, _T)).astype(np.float32)
  columns = ('rewards', 'old_logp', 'ref_logp', 'advantages', 'returns', 'behaviour_logp')
  values = np.random.default_rng(seed).normal(size=(rows, _T))
  turn_ids = jnp.tile(jnp.asarray([[0, 1, 2], [1, 0, 2]], jnp.int32), (group_size, 1))
  return types.TurnBatch(
      tokens=jnp.ones((rows, _T), jnp.int32),
      action_mask=(turn_ids > 0).astype(jnp.float32),
      turn_ids=turn_ids,
      old_values=jnp.asarray(values, jnp.float32),
      group_ids=jnp.repeat(jnp.arange(_GROUPS, dtype=jnp.int32), group_size),
      truncated=jnp.zeros(rows),
      **dict(zip(columns, map(jnp.asarray, drawn))),
  )


_CHECKS = {'advantage': _advantage, 'ratio': _ratio, 'surrogate': _surrogate, 'divisor': _divisor}
