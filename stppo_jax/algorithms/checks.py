"""Checks a user's function for a field of a variant, before any weight is loaded."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import plugins
from stppo_jax.algorithms import advantages
from stppo_jax.algorithms.variants import Variant
from stppo_jax.types import TurnBatch

_NUM_GROUPS = 2
_NUM_TOKENS = 3


def check(column: str, function: Callable, variant: Variant, group_size: int = 1) -> str:
  """Returns what is wrong with the function of a field of variants.BUILT_IN; '' if nothing is.

  The function is traced for its shapes, as a run does, with a batch of two groups.
  """
  try:
    return _CHECKS[column](function, variant, group_size)
  except Exception as error:  # a user's function may raise anything
    place = plugins.user_line(traceback.extract_tb(error.__traceback__))
    message = str(error).strip().partition('\n')[0]
    return f'it raised {type(error).__name__}: {message}' + (f' ({place})' if place else '')


def _check_advantage(function, variant, group_size):
  estimator = advantages.estimator(function)
  estimate = functools.partial(estimator, variant=variant)
  batch = _example_batch(group_size)
  result = jax.eval_shape(estimate, batch)
  wrong = _compare_shapes(result, ('advantages', 'returns'), batch.rewards.shape)
  if wrong or estimator.needs_critic:
    return wrong
  try:
    without_values = dataclasses.replace(batch, old_values=None)  # type: ignore[arg-type]
    jax.eval_shape(estimate, without_values)
  except Exception:  # the function needs the values
    return (
        'it reads old_values, and no critic is trained for it: set its attribute '
        'needs_critic=True, or wrap it in advantages.from_values'
    )
  return ''


def _check_ratio(function, variant, group_size):
  batch = _example_batch(group_size)
  labels = jax.eval_shape(lambda batch: function(batch, variant), batch)
  shape = batch.rewards.shape
  if getattr(labels, 'shape', None) == shape and jnp.issubdtype(labels.dtype, jnp.integer):
    return ''
  dtype = f'{labels.dtype} ' if hasattr(labels, 'dtype') else ''
  return (
      f'it has to return integers [B,T], and returned {dtype}{_shape_text(labels)} for '
      f'[B,T] = {list(shape)}'
  )


def _check_surrogate(function, variant, group_size):
  x = jnp.zeros((_NUM_GROUPS * group_size, _NUM_TOKENS))
  result = jax.eval_shape(lambda *args: function(*args, variant), x, x, x)
  return _compare_shapes(result, ('objective', 'clipped'), x.shape)


def _check_divisor(function, variant, group_size):
  del variant, group_size
  result = jax.eval_shape(function, jnp.float32(1), jnp.float32(1), jnp.bool_(True))
  if getattr(result, 'shape', None) == ():
    return ''
  return f'it has to return one number, and returned {_shape_text(result)}'


def _compare_shapes(result: Any, names: Sequence[str], shape: tuple[int, ...]) -> str:
  """Returns '' if `result` is a tuple with an array of the shape for each name."""
  is_complete = isinstance(result, tuple) and len(result) == len(names)
  if is_complete and all(getattr(x, 'shape', None) == shape for x in result):
    return ''
  return (
      f'it has to return ({", ".join(names)}), each [B,T], and returned {_shape_text(result)} for '
      f'[B,T] = {list(shape)}'
  )


def _shape_text(value: Any) -> str:
  if isinstance(value, tuple):
    return f'({", ".join(map(_shape_text, value))})'
  return str(list(value.shape)) if hasattr(value, 'shape') else type(value).__name__


def _example_batch(group_size: int) -> TurnBatch:
  num_rows = _NUM_GROUPS * group_size
  turn_ids = jnp.tile(jnp.asarray([[0, 1, 2], [1, 0, 2]], jnp.int32), (group_size, 1))
  x = jnp.zeros((num_rows, _NUM_TOKENS))
  return TurnBatch(
      tokens=jnp.ones((num_rows, _NUM_TOKENS), jnp.int32),
      action_mask=(turn_ids > 0).astype(jnp.float32),
      turn_ids=turn_ids,
      rewards=x,
      old_logp=x,
      ref_logp=x,
      old_values=x,
      advantages=x,
      returns=x,
      group_ids=jnp.repeat(jnp.arange(_NUM_GROUPS, dtype=jnp.int32), group_size),
      behaviour_logp=x,
      truncated=jnp.zeros(num_rows),
  )


_CHECKS = {
    'advantage': _check_advantage,
    'ratio': _check_ratio,
    'surrogate': _check_surrogate,
    'divisor': _check_divisor,
}
