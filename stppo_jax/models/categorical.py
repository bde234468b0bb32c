"""Log-prob and entropy of a categorical distribution, with one pass for both derivatives."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def logp_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (log softmax(logits)[tokens], entropy of softmax(logits)), both [..].

  logits [..,V] are float32, tokens [..]. The derivative is written by hand as one pass over [..,V]
  with one exp for both cotangents. With probabilities p and entropy H,
    d logp[v] / d logits[u] = 1{u=v} - p[u],   d H / d logits[u] = -p[u] (log p[u] + H).
  """
  return _forward(logits, tokens)[0]


def _forward(logits, tokens):
  peak = logits.max(axis=-1)
  log_sum = jnp.log(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
  log_probs = _log_probs(logits, peak, log_sum)
  logp = jnp.sum(jnp.where(_is_token(logits, tokens), log_probs, 0), axis=-1)
  entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
  return (logp, entropy), (logits, tokens, peak, log_sum, entropy)


def _backward(residuals, cotangents):
  logits, tokens, peak, log_sum, entropy = residuals
  d_logp, d_entropy = (x[..., None] for x in cotangents)
  log_probs = _log_probs(logits, peak, log_sum)
  spread = jnp.exp(log_probs) * (d_logp + d_entropy * (log_probs + entropy[..., None]))
  return jnp.where(_is_token(logits, tokens), d_logp, 0) - spread, None


def _log_probs(logits, peak, log_sum):
  # In this order, since subtracting the log-sum-exp of large logits at once would lose digits.
  return (logits - peak[..., None]) - log_sum[..., None]


def _is_token(logits, tokens):
  return jnp.arange(logits.shape[-1]) == tokens[..., None]


logp_and_entropy.defvjp(_forward, _backward)
