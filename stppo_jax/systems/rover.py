"""ROVER (arXiv 2509.24981, authors' code): regression on the values of the uniform policy."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import losses
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import RowObjective
from stppo_jax.types import TurnBatch


def rover(
    outputs: objectives.TokenOutputs, batch: TurnBatch, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns ROVER's terms, a regression of each token's value (authors' code).

  -mean over tokens of ( q_t - sg[ a + alpha beta (m_t' - m_old_t') ] )^2,
  q_t = beta (logp_t - old_logp_t),   m_t = mean over the vocabulary of log pi(. | s_t)

  (tinnerhrhe/ROVER `compute_rover_loss`, where beta is `rover_t` and alpha is
  `next_q_scale_factor`). q is the value of an action, and the mean of q over the vocabulary is that
  of a state for the uniform policy. t' is the next agent token of the row. After the last one the
  value is 0. `aggregation` is the mean.
  Choice: t' may be in the next turn, as in GAE.
  """
  mask = objectives.counted_tokens(batch)
  assert outputs.uniform is not None and batch.old_uniform is not None  # declared in `needs`
  drift = outputs.uniform - batch.old_uniform
  drift = jax.lax.stop_gradient(drift)
  next_drift = _at_next_token(drift, mask)
  target = batch.advantages + variant.alpha * variant.beta * next_drift
  log_ratio = outputs.logp - batch.old_logp
  q = variant.beta * log_ratio
  error = jnp.where(mask, q - target, 0)
  weights = losses.variant_weights(mask, batch, variant)
  token_losses = weights * jnp.square(error)
  row_values = -token_losses.sum(axis=1)
  return row_values, objectives.nothing_clipped(outputs)


def _at_next_token(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns x [b,T] at the next token of `mask` in the row; 0 where there is none."""

  def step(value_after, column):
    value, is_in_mask = column
    value_here = jnp.where(is_in_mask, value, value_after)
    return value_here, value_after

  nothing = jnp.zeros_like(x[:, 0])
  columns = (x.T, mask.T)
  _, values_after = jax.lax.scan(step, nothing, columns, reverse=True)
  return values_after.T


ROVER = RowObjective(rover, needs=('uniform',), reads=('alpha', 'beta', 'aggregation'))
