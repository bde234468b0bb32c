"""Segments: which tokens share an importance ratio.

One function computes token, turn and sequence ratios: the exponential of the mean log-ratio of a
segment. Only the segment ids differ.
"""

import functools

import chex
import jax
import jax.numpy as jnp

LEVELS = ('token', 'turn', 'sequence')
MAX_LOG_RATIO = 20.0  # as in verl. In float32, exp of more than 88 is infinite.


def segment_ids(
    level: str, action_mask: jax.Array, turn_ids: jax.Array, chunk_length: int = 0
) -> tuple[jax.Array, int]:
  """Returns the segment id of each token [B,T], and the number of ids.

  Tokens with the same id in a row share a ratio. The id is 0 outside the agent's tokens. The number
  is a static upper bound, and a row may use fewer ids.

  token     each token is a segment
  turn      each turn is a segment. A turn is a maximal run of agent tokens between two
            observations, so these are also ROLL's segments.
  sequence  all agent tokens of a row are one segment
  chunk     each `chunk_length` agent tokens of a row are a segment. It may end one turn and begin
            the next. This level is a control for turns: it does not depend on the environment.
  """
  chex.assert_equal_shape([action_mask, turn_ids])
  mask = action_mask.astype(jnp.int32)
  if level == 'sequence':
    return mask, 2
  num_ids = mask.shape[1] + 1
  if level == 'token':
    ids = jnp.arange(1, num_ids)
    ids = ids[None, :]
  elif level == 'turn':
    ids = turn_ids
  elif level == 'chunk':
    index = jnp.cumsum(mask, axis=1) - 1  # position among the agent tokens of the row
    ids = index // chunk_length + 1
  else:
    raise ValueError(f'level {level!r} is none of {", ".join(LEVELS)}, chunk')
  return mask * ids, num_ids


def from_labels(labels: jax.Array, action_mask: jax.Array) -> tuple[jax.Array, int]:
  """Returns the segment ids of labels [B,T], which are any integers, and the number of ids.

  Tokens of one row with equal labels are a segment. They need not be adjacent.
  """
  chex.assert_equal_shape([labels, action_mask])
  order = jnp.argsort(labels, axis=1)
  sorted_labels = jnp.take_along_axis(labels, order, axis=1)
  before_first = sorted_labels[:, :1] - 1
  steps = jnp.diff(sorted_labels, axis=1, prepend=before_first)
  is_new = steps != 0
  sorted_ranks = jnp.cumsum(is_new, axis=1)
  places = jnp.argsort(order, axis=1)
  ranks = jnp.take_along_axis(sorted_ranks, places, axis=1)
  mask = action_mask.astype(jnp.int32)
  num_ids = labels.shape[1] + 1
  return ranks * mask, num_ids


def segment_sum(x: jax.Array, segment_ids: jax.Array, num_segments: int) -> jax.Array:
  """Returns the sum of x [B,T] over each segment of each row [B,num_segments]."""
  sum_row = functools.partial(jax.ops.segment_sum, num_segments=num_segments)
  sum_rows = jax.vmap(sum_row)
  return sum_rows(x, segment_ids)


def segment_mean(
    x: jax.Array, segment_ids: jax.Array, mask: jax.Array, num_segments: int
) -> jax.Array:
  """Returns the mean of x [B,T] over the masked tokens of each token's own segment [B,T].

  The mean is 0 where `mask` is 0. It is differentiable in x: each token of a segment receives
  1 / |segment|.
  """
  chex.assert_rank([x, segment_ids, mask], 2)
  chex.assert_equal_shape([x, segment_ids, mask])
  mask = mask.astype(x.dtype)
  masked = jnp.where(mask > 0, x, 0)
  totals = segment_sum(masked, segment_ids, num_segments)
  counts = segment_sum(mask, segment_ids, num_segments)
  means = totals / jnp.maximum(counts, 1)
  own_means = jnp.take_along_axis(means, segment_ids, axis=1)
  return own_means * mask


def bounded(log_ratio: jax.Array) -> jax.Array:
  """Returns log-ratios of any shape, kept within +-`MAX_LOG_RATIO`."""
  return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(
    logp: jax.Array,
    old_logp: jax.Array,
    action_mask: jax.Array,
    segment_ids: jax.Array,
    num_segments: int,
    product: bool = False,
) -> jax.Array:
  """Returns the geometric mean of the ratios in each token's segment [B,T]; 1 outside segments.

  w^k = exp( (1/|y^k|) sum_{t in k} (logp_t - old_logp_t) )      (arXiv 2511.20718, Turn-PPO)

  The gradient runs through the mean: d w^k / d logp_t = w^k / |y^k| for every token t of k, as in
  Lemma 4.1. GSPO's token form has the same value and another gradient.
  With `product` the ratio is exp(sum) instead, the ratio of the segment's probabilities.
  Choice: log w is kept within +-20, as in verl. Beyond, the ratio is constant.
  """
  chex.assert_equal_shape([logp, old_logp, action_mask, segment_ids])
  difference = logp - old_logp
  log_ratio = segment_mean(difference, segment_ids, action_mask, num_segments)
  if product:
    mask = action_mask.astype(log_ratio.dtype)
    lengths = segment_sum(mask, segment_ids, num_segments)
    own_lengths = jnp.take_along_axis(lengths, segment_ids, axis=1)
    log_ratio *= own_lengths
  log_ratio = bounded(log_ratio)
  return jnp.exp(log_ratio)
