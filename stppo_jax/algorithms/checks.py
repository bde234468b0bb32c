"""Checks a user's function for a field of a variant, before any weight is loaded."""

from collections.abc import Callable
import dataclasses
import functools
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import plugins
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.types import TurnBatch

_NUM_GROUPS = 2
_NUM_TOKENS = 3

# Columns of a batch that a user's function may read.
_COLUMNS = (
    'rewards old_logp ref_logp old_values advantages returns behaviour_logp old_uniform'.split()
)

# Field of a variant -> what its function returns.
_RETURNED = {
    'advantage': '(advantages, returns), each [B,T]',
    'ratio': 'integers [B,T]',
    'surrogate': '(objective, clipped), each [B,T]',
    'objective': '(row_values, clipped), [B] and [B,T]',
    'divisor': 'one number',
}


def check(field: str, function: Callable, variant: BaseVariant, group_size: int = 1) -> str:
  """Returns what is wrong with the function of one of variant.FUNCTION_FIELDS; '' if nothing is.

  The function is traced for its shapes, as a run does, with a batch of two groups.
  """
  batch = _example_batch(group_size)
  x = batch.rewards
  number = jnp.float32(1)
  outputs = objectives.TokenOutputs(x)  # with what the objective declares, and no more
  if 'uniform' in variant.needs:
    outputs = outputs._replace(uniform=x)
  if 'reference_kl' in variant.needs:
    outputs = outputs._replace(reference_kl=x)
  arguments: dict[str, tuple] = {
      'advantage': (batch,),
      'ratio': (batch,),
      'surrogate': (x, x, x),
      'objective': (outputs, batch),
      'divisor': (number, number, jnp.bool_(True)),
  }
  if field != 'divisor':
    function = functools.partial(_call, function, variant)
  try:
    result = jax.eval_shape(function, *arguments[field])
  except Exception as error:  # a user's function may raise anything
    place = plugins.user_line(traceback.extract_tb(error.__traceback__))
    message = str(error).strip().partition('\n')[0]
    return f'it raised {type(error).__name__}: {message}' + (f' ({place})' if place else '')

  expected = {
      'advantage': (x.shape, x.shape),
      'ratio': x.shape,
      'surrogate': (x.shape, x.shape),
      'objective': (x.shape[:1], x.shape),
      'divisor': (),
  }
  is_right = _shapes(result) == expected[field]
  if field == 'ratio' and is_right:
    is_right = jnp.issubdtype(result.dtype, jnp.integer)
  if not is_right:
    return (
        f'it has to return {_RETURNED[field]}, and returned {_describe(result)} for [B,T] = '
        f'{list(x.shape)}'
    )
  if field == 'advantage' and not variant.needs_critic:
    return _check_values_unused(function, batch)
  if field == 'surrogate':
    return _check_tokens_alone(function, x.shape)
  return ''


def _call(function, variant, *arguments):
  return function(*arguments, variant)


def _check_values_unused(estimate, batch):
  """Returns what is wrong with an advantage that no critic is trained for."""
  try:
    without_values = dataclasses.replace(batch, old_values=None)
    jax.eval_shape(estimate, without_values)
  except Exception:  # the function needs the values
    return (
        'it reads old_values, and no critic is trained for it: wrap it in ' 'advantages.from_values'
    )
  return ''


def _check_tokens_alone(surrogate, shape):
  """Returns what is wrong with a surrogate that reads more than one token."""
  keys = jax.random.split(jax.random.key(0), 3)
  log_ratio, logp, advantages = (jax.random.normal(key, shape) for key in keys)
  arguments = (jnp.exp(log_ratio), logp, advantages)
  together = surrogate(*arguments)
  for i, j in np.ndindex(shape):
    place = slice(i, i + 1), slice(j, j + 1)
    alone = surrogate(*(argument[place] for argument in arguments))
    for value, expected in zip(alone, together):
      if not np.allclose(value, expected[place], rtol=1e-4, atol=1e-6, equal_nan=True):
        return (
            'what it returns for a token depends on other tokens, and a run calls it with a few '
            'bins at a time, whose number changes with the micro-batch and the devices: read only '
            "the token's own ratio, logp and advantage, and normalise in the advantage"
        )
  return ''


def _shapes(result: object) -> object:
  if isinstance(result, tuple):
    return tuple(map(_shapes, result))
  return getattr(result, 'shape', None)


def _describe(result: Any) -> str:
  if isinstance(result, tuple):
    return f'({", ".join(map(_describe, result))})'
  if not hasattr(result, 'shape'):
    return type(result).__name__
  return f'{result.dtype} {list(result.shape)}'


def _example_batch(group_size: int) -> TurnBatch:
  num_rows = _NUM_GROUPS * group_size
  turn_ids = jnp.tile(jnp.asarray([[0, 1, 2], [1, 0, 2]], jnp.int32), (group_size, 1))
  zeros = jnp.zeros((num_rows, _NUM_TOKENS))
  empty: Any = dict.fromkeys(_COLUMNS, zeros)
  return TurnBatch(
      tokens=turn_ids,
      action_mask=(turn_ids > 0).astype(jnp.float32),
      turn_ids=turn_ids,
      group_ids=jnp.repeat(jnp.arange(_NUM_GROUPS, dtype=jnp.int32), group_size),
      truncated=jnp.zeros(num_rows),
      **empty,
  )
