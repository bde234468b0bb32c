"""Log-prob and entropy of a categorical distribution, with one pass for both derivatives.

head_chunks.py computes them from the input and the matrix of the output head, in chunks of V,
so that the logits [..,V] never exist.
"""

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float) -> jax.Array:
  """Returns cap tanh(x / cap), which lies within +-cap (Gemma 2, arXiv 2408.00118). 0: x."""
  if not cap:
    return x
  return cap * jnp.tanh(x / cap)


def logp_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (log softmax(logits)[tokens], entropy of softmax(logits)), both [..].

  logits [..,V] are float32, tokens [..].
  """
  logp, entropy, _ = statistics(logits, tokens, jnp.arange(logits.shape[-1]))
  return logp, entropy


@jax.custom_vjp
def statistics(logits, tokens, ids):
  """Returns (log-prob of the token, entropy, log-sum-exp of the logits), all [..].

  ids [V] are the tokens of the columns.

  The derivative is written by hand as one pass over [..,V] with one exp for all cotangents. With
  probabilities p, entropy H and log-sum-exp s,
    d logp[v] / d logits[u] = 1{u=v} - p[u],   d H / d logits[u] = -p[u] (log p[u] + H),
    d s / d logits[u] = p[u].
  """
  return _forward(logits, tokens, ids)[0]


def _forward(logits, tokens, ids):
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
  residuals = (logits, tokens, ids, peak, log_sum, entropy)
  return (logp, entropy, peak + log_sum), residuals


def _backward(residuals, cotangents):
  logits, tokens, ids, peak, log_sum, entropy = residuals
  d_logp, d_entropy, d_log_sum = (x[..., None] for x in cotangents)
  log_probs = _log_probs(logits, peak, log_sum)
  probs = jnp.exp(log_probs)
  spread = d_logp + d_entropy * (log_probs + entropy[..., None])
  spread -= d_log_sum
  is_token = ids == tokens[..., None]
  at_token = jnp.where(is_token, d_logp, 0)
  d_logits = at_token - probs * spread
  return d_logits, None, None


statistics.defvjp(_forward, _backward)


def _log_probs(logits, peak, log_sum):
  # In this order, because subtracting the log-sum-exp of large logits at once would lose digits.
  return (logits - peak[..., None]) - log_sum[..., None]
