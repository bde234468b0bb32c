"""MaxRL: group advantages that are normalised by the mean score instead of the standard deviation.

A question that is rarely solved weighs more: of eight episodes with one success, the success gets
(1 - 1/8) / (1/8) = 7. With GRPO's standard deviation it gets 2.5.
"""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import variants


def over_mean(scores: jax.Array, group_ids: jax.Array) -> jax.Array:
  """Returns (score - mean of its group) / mean of its group, [B]; 0 where the mean is 0."""
  same = group_ids[:, None] == group_ids[None, :]  # [B,B]
  mean = jnp.sum(jnp.where(same, scores[None, :], 0), axis=1) / same.sum(axis=1)
  return jnp.where(mean > 0, (scores - mean) / jnp.where(mean > 0, mean, 1), 0)


MAX_RL = variants.Variant(
    advantage=advantages.from_groups(over_mean), ratio='token', kl_in='none', entropy_coef=0.0
)
