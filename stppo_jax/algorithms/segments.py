"""Segments: which tokens share an importance ratio.

With a segment id per token, token PPO, Turn-PPO and GSPO are the same function: the ratio is the
exponential of a segment's mean log-ratio, and only the ids differ.
"""

import chex
import jax
import jax.numpy as jnp

LEVELS = ('token', 'turn', 'sequence')
MAX_LOG_RATIO = 20.0  # of a segment, as in verl: exp of more than 88 is infinite in float32


def segment_ids(
    level: str, action_mask: jax.Array, turn_ids: jax.Array, chunk_length: int = 0
) -> tuple[jax.Array, int]:
  """Returns ids [B,T] of the tokens that share a ratio, 0 outside agent tokens; and their number.

  `level` is 'token' (each its own), 'turn' (`turn_ids`) or 'sequence' (all of a row). A turn is a
  maximal run of agent tokens between two observations, so these are ROLL's segments. The number
  is static: a bound (T + 1), not a count. A row may use fewer.
  Level 'chunk' is a control for turns, segments that know nothing of the environment: each
  `chunk_length` agent tokens of a row. A chunk may end one turn and begin the next.
  """
  chex.assert_equal_shape([action_mask, turn_ids])
  mask = action_mask.astype(jnp.int32)
  num_tokens = mask.shape[1]
  if level == 'token':
    return mask * jnp.arange(1, num_tokens + 1, dtype=jnp.int32)[None, :], num_tokens + 1
  if level == 'turn':
    return mask * turn_ids.astype(jnp.int32), num_tokens + 1
  if level == 'chunk':
    return mask * ((jnp.cumsum(mask, axis=1) - 1) // chunk_length + 1), num_tokens + 1
  if level == 'sequence':
    return mask, 2
  raise ValueError(f'level {level!r} is none of {", ".join(LEVELS)}, chunk')


def from_labels(labels: jax.Array, action_mask: jax.Array) -> tuple[jax.Array, int]:
  """Returns `segment_ids` of labels [B,T], any integers.

  Tokens of one row with equal labels are a segment, adjacent or not.
  """
  chex.assert_equal_shape([labels, action_mask])
  order = jnp.argsort(labels, axis=1)
  ordered = jnp.take_along_axis(labels, order, axis=1)
  is_new = jnp.diff(ordered, axis=1, prepend=ordered[:, :1] - 1) != 0
  ranks = jnp.take_along_axis(jnp.cumsum(is_new, axis=1), jnp.argsort(order, axis=1), axis=1)
  return ranks * action_mask.astype(jnp.int32), labels.shape[1] + 1


def segment_sum(x: jax.Array, ids: jax.Array, num_segments: int) -> jax.Array:
  """Sums x [B,T] over each row's segments -> [B,num_segments]."""
  return jax.vmap(lambda row, row_ids: jax.ops.segment_sum(row, row_ids, num_segments))(x, ids)


def segment_mean(
    x: jax.Array, segment_ids: jax.Array, mask: jax.Array, num_segments: int
) -> jax.Array:
  """Returns the mean of x [B,T] over the masked tokens of each token's own segment [B,T].

  0 where `mask` is 0. Differentiable in x: each token of a segment receives 1/|segment|.
  """
  chex.assert_rank([x, segment_ids, mask], 2)
  chex.assert_equal_shape([x, segment_ids, mask])
  mask = mask.astype(x.dtype)
  totals = segment_sum(jnp.where(mask > 0, x, 0), segment_ids, num_segments)
  counts = segment_sum(mask, segment_ids, num_segments)
  means = totals / jnp.maximum(counts, 1)
  return jnp.take_along_axis(means, segment_ids, axis=1) * mask


def importance_ratio(
    logp: jax.Array,
    old_logp: jax.Array,
    action_mask: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    product: bool = False,
) -> jax.Array:
  """Returns the geometric-mean ratio of each token's segment [B,T]; 1 outside agent tokens.

  w^k = exp( (1/|y^k|) sum_{t in k} (logp_t - old_logp_t) )      (arXiv 2511.20718, Turn-PPO)

  The gradient runs through the mean: d w^k / d logp_t = w^k / |y^k| for every token t of k. This is
  Lemma 4.1's estimator; GSPO's token form has the same value and another gradient.
  With `product` the sum takes the mean's place: the ratio of the segments' probabilities.
  Choice: as in verl, log w is kept within +-20; beyond, the ratio is constant.
  """
  chex.assert_equal_shape([logp, old_logp, action_mask, segment_ids])
  log_ratio = segment_mean(logp - old_logp, segment_ids, action_mask, num_segments)
  if product:
    lengths = segment_sum(action_mask.astype(log_ratio.dtype), segment_ids, num_segments)
    log_ratio *= jnp.take_along_axis(lengths, segment_ids, axis=1)
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
