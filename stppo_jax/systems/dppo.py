"""DPPO (arXiv 2602.04879): bounds on the change of a token's probability in place of its ratio."""

import jax
import jax.numpy as jnp

from stppo_jax.algorithms.variant import BaseVariant

MAX_RATIO = 20.0  # as in verl


def dppo_tv(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns DPPO's surrogate with bounds on the change of a token's probability.

  sg(min(w, 20)) A logp where the change p - p_old is within its bound in the direction of A, else 0
  (arXiv 2602.04879, binary total variation). The ratio must be that of tokens: p_old = p / w.
  """
  prob, old_prob = _probabilities(ratio, logp)
  is_up = prob - old_prob > variant.clip_high
  is_down = old_prob - prob > variant.clip_low
  return _dppo(ratio, logp, advantages, is_up, is_down)


def dppo_kl(
    ratio: jax.Array, logp: jax.Array, advantages: jax.Array, variant: BaseVariant
) -> tuple[jax.Array, jax.Array]:
  """Returns DPPO's surrogate with bounds on the binary KL between p_old and p, in nats."""
  prob, old_prob = _probabilities(ratio, logp)
  # Not 1 - p + 1e-8: compiled, that is (1 + 1e-8) - p, where 1e-8 is lost.
  rest = jnp.maximum(1 - prob, 1e-8)
  old_rest = jnp.maximum(1 - old_prob, 1e-8)
  token_part = -old_prob * jnp.log(ratio)
  rest_part = old_rest * jnp.log(old_rest / rest)
  binary_kl = token_part + rest_part
  is_up = (binary_kl > variant.clip_high) & (prob > old_prob)
  is_down = (binary_kl > variant.clip_low) & (prob < old_prob)
  return _dppo(ratio, logp, advantages, is_up, is_down)


def _probabilities(ratio, logp):
  """Returns (p, p_old) of the sampled tokens, as constants."""
  prob = jnp.exp(jax.lax.stop_gradient(logp))
  old_prob = jnp.minimum(prob / jax.lax.stop_gradient(ratio), 1)
  return prob, old_prob


def _dppo(ratio, logp, advantages, is_up, is_down):
  """Returns sg(min(w, 20)) A logp; 0 where the probability went too far in the direction of A."""
  stopped = jnp.where(advantages > 0, is_up, is_down)
  weight = jnp.minimum(ratio, MAX_RATIO)
  objective = jax.lax.stop_gradient(weight) * advantages * logp
  return jnp.where(stopped, 0, objective), stopped
