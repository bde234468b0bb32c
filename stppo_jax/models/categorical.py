"""Log-prob and entropy of a categorical distribution, with one cheap pass for both derivatives."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def logp_and_entropy(logits, tokens):
  """float32 logits [..,V], tokens [..] -> (log softmax(logits)[tokens], entropy of softmax(logits)) [..].

  The derivative is written out so that it is one pass over [..,V] with one exp, whatever the two
  cotangents are: with p the probabilities and H the entropy,
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
  # In this order: large logits minus their log-sum-exp at once would lose the last digits.
  return (logits - peak[..., None]) - log_sum[..., None]


def _is_token(logits, tokens):
  return jnp.arange(logits.shape[-1]) == tokens[..., None]


logp_and_entropy.defvjp(_forward, _backward)
