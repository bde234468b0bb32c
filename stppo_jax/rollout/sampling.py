"""Sampling of one token per row: logits and keys in, tokens and log-probs out."""

import chex
import jax
import jax.numpy as jnp

from stppo_jax import types

_BLOCK = 128  # indices per block of `_draw`


def sample_token(
    logits: jax.Array, keys: jax.Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """Draws a token per row, with its log-prob: logits [B,V], keys [B] -> (token [B], logp [B]).

  The distribution is softmax(logits / temperature), cut to the top_k likeliest tokens, then to the
  fewest likeliest that hold a mass of top_p, then renormalised. The log-prob is that of this very
  distribution. Choice: among equal logits the lower id counts as likelier. Choice: temperature 0 is
  greedy and reports the model's plain log-prob, at temperature 1 and uncut.
  """
  chex.assert_rank(logits, 2)
  chex.assert_shape(keys, logits.shape[:1])
  logits = logits.astype(jnp.float32)
  if temperature == 0:
    token = jnp.argmax(logits, axis=-1)
    return token.astype(jnp.int32), _take(jax.nn.log_softmax(logits), token)
  logits = logits / temperature
  cut = 0 < top_k < logits.shape[1] or top_p < 1
  if cut:
    kept = top_k if 0 < top_k < logits.shape[1] else logits.shape[1]
    logits, ids = jax.lax.top_k(logits, kept)  # [B,kept], likeliest first
  if top_p < 1:
    probs = jax.nn.softmax(logits)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    first = jnp.arange(logits.shape[1]) == 0  # always kept, however small top_p is
    logits = jnp.where(first | (mass_before < top_p), logits, -jnp.inf)
  choice, logp = _draw(logits, keys)
  token = _take(ids, choice) if cut else choice
  return token.astype(jnp.int32), logp


def _draw(logits, keys):
  """Draws from softmax(logits): logits [B,V], keys [B] -> (index [B], logp [B]).

  By inversion: first a block of indices by the blocks' masses, then an index in it, each with a
  uniform number of its own, so that the tail of a large vocabulary is not rounded away. This takes
  one exp per index; Gumbel noise would take two logs and a random number.
  """
  rows, size = logits.shape
  peak = logits.max(axis=-1)
  blocks = -(-size // _BLOCK)
  mass = jnp.pad(jnp.exp(logits - peak[:, None]), ((0, 0), (0, blocks * _BLOCK - size)))
  mass = mass.reshape(rows, blocks, _BLOCK)
  block_mass = mass.sum(axis=-1)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  block = _invert(block_mass, uniform[:, 0])
  mass_here = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  choice = block * _BLOCK + _invert(mass_here, uniform[:, 1])
  return choice, _take(logits, choice) - peak - jnp.log(block_mass.sum(axis=-1))


def _invert(mass, uniform):
  """Returns the first index at which the cumulative mass [B,n] exceeds its share `uniform` [B].

  An index without mass is never returned, whatever the rounding.
  """
  reached = jnp.cumsum(mass, axis=-1)
  beyond = (reached > uniform[:, None] * reached[:, -1:]) & (mass > 0)
  return jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), jnp.argmax(mass, axis=-1))


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
  """Raises a UserError unless the three numbers describe a distribution."""
  if temperature < 0:
    raise types.UserError(f'temperature={temperature}: give 0 (greedy) or more')
  if top_k < 0:
    raise types.UserError(f'top_k={top_k}: give 0 (off) or more')
  if not 0 < top_p <= 1:
    raise types.UserError(f'top_p={top_p}: give more than 0 and at most 1 (off)')


def _take(values, index):
  """Takes values [B,V] at index [B] -> [B]."""
  return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]
