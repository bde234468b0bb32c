"""CISPO (MiniMax-M1, arXiv 2506.13585): clips the importance weight, keeps every gradient.

PPO's clip stops the gradient of a token whose ratio is out of range. CISPO bounds the weight of its
log-prob instead, so that rare but decisive tokens stay in the update.
"""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import variants


def cispo(ratio, logp, advantages, variant):
  """sg(clip(w, 1 - clip_low, 1 + clip_high)) A logp [B,T], and where the weight was clipped."""
  weight = jnp.clip(ratio, 1 - variant.clip_low, 1 + variant.clip_high)
  return jax.lax.stop_gradient(weight) * advantages * logp, weight != ratio


CISPO = variants.Variant(
    advantage='group_zscore',
    ratio='token',
    surrogate=cispo,
    clip_low=1.0,  # no lower bound, as in the paper
    clip_high=0.2,
    aggregation='token-mean',
    kl_in='none',
    entropy_coef=0.0,
)
