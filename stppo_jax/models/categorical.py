"""Log-prob and entropy of a categorical distribution, with one pass for both derivatives.

head_chunks.py computes them from the input and the matrix of the output head, in chunks of V,
so that the logits [..,V] never exist.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float) -> jax.Array:
  """Returns cap tanh(x / cap), which lies within +-cap (Gemma 2, arXiv 2408.00118). 0: x."""
  if not cap:
    return x
  return cap * jnp.tanh(x / cap)


class Statistics(NamedTuple):
  """What `statistics` finds, all [..]."""

  logp: jax.Array  # log-prob of the token; 0 if no column has it
  entropy: jax.Array
  peak: jax.Array  # the largest logit
  log_sum: jax.Array  # the log-sum-exp of the logits, less the peak


@jax.custom_vjp
def logp_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (log softmax(logits)[tokens], entropy of softmax(logits)), both [..].

  logits [..,V] are float32, tokens [..]. The derivative is that of `d_logits`.
  """
  return _forward(logits, tokens)[0]


def statistics(logits: jax.Array, tokens: jax.Array, ids: jax.Array) -> Statistics:
  """Returns the Statistics of logits [..,V], whose columns are the tokens `ids` [V]."""
  peak = logits.max(axis=-1)
  exponentials = jnp.exp(logits - peak[..., None])
  total = jnp.sum(exponentials, axis=-1)
  log_sum = jnp.log(total)
  log_probs = _log_probs(logits, peak, log_sum)
  is_token = ids == tokens[..., None]
  at_token = jnp.where(is_token, log_probs, 0)
  logp = jnp.sum(at_token, axis=-1)
  probs = jnp.exp(log_probs)
  entropy = -jnp.sum(probs * log_probs, axis=-1)
  return Statistics(logp, entropy, peak, log_sum)


def d_logits(
    logits: jax.Array,
    tokens: jax.Array,
    ids: jax.Array,
    found: Statistics,
    d_logp: jax.Array,
    d_entropy: jax.Array,
) -> jax.Array:
  """Returns the cotangent of the logits [..,V] in one pass with one exp.

  `ids` [V] are the tokens of the columns, which may be some of those that `found` was made of. With
  probabilities p and entropy H,
    d logp[v] / d logits[u] = 1{u=v} - p[u],   d H / d logits[u] = -p[u] (log p[u] + H).
  """
  _, entropy, peak, log_sum = found
  d_logp = d_logp[..., None]
  log_probs = _log_probs(logits, peak, log_sum)
  probs = jnp.exp(log_probs)
  spread = d_logp + d_entropy[..., None] * (log_probs + entropy[..., None])
  is_token = ids == tokens[..., None]
  at_token = jnp.where(is_token, d_logp, 0)
  return at_token - probs * spread


def _forward(logits, tokens):
  found = statistics(logits, tokens, jnp.arange(logits.shape[-1]))
  return (found.logp, found.entropy), (logits, tokens, found)


def _backward(residuals, cotangents):
  logits, tokens, found = residuals
  ids = jnp.arange(logits.shape[-1])
  return d_logits(logits, tokens, ids, found, *cotangents), None


logp_and_entropy.defvjp(_forward, _backward)


def _log_probs(logits, peak, log_sum):
  # In this order, because subtracting the log-sum-exp of large logits at once would lose digits.
  return (logits - peak[..., None]) - log_sum[..., None]
