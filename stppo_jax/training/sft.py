"""Supervised warm start: demonstrations in, parameters out.

A demonstration is a prompt and turns, as token ids, with the same borders that an episode has: so what
is learnt here is what is sampled later, to the token.
"""

import functools
import typing

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax.models import decoder


class Demonstration(typing.NamedTuple):
  """One row: `weights` is 1 on the tokens to imitate (the agent's), less on what it only reads."""

  tokens: np.ndarray  # [T] int32
  weights: np.ndarray  # [T] float32


def train(params, config, draw, *, steps, rows, buckets, optimizer, seed, log_every=100):
  """Minimises the weighted mean of the tokens' negative log-probs; returns the parameters.

  `draw(rng, rows)` gives that many Demonstrations; each batch is padded to the smallest of `buckets`
  that holds it. Deterministic for a seed.
  """

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, tokens, weights):
    def loss(params):
      x, _ = decoder.hidden(params, config, tokens, None)
      logp, _ = decoder.token_logp(params, config, x, tokens)
      mean = lambda weights: -jnp.sum(logp * weights) / jnp.maximum(weights.sum(), 1)
      return mean(weights), mean(weights == 1)

    (_, imitated), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, imitated

  rng = np.random.default_rng(seed)
  params = jax.tree.map(jnp.array, params)
  opt_state = optimizer.init(params)
  losses = []
  for n in range(1, steps + 1):
    tokens, weights = pad(draw(rng, rows), buckets)
    params, opt_state, value = step(params, opt_state, tokens, weights)
    losses.append(value)
    if n % log_every == 0:
      logging.info('warm start %d/%d: loss on tokens to imitate %.3f', n, steps,
                   np.mean(jax.device_get(losses)))
      losses = []
  return params


def pad(demonstrations, buckets):
  """(tokens [B,T] int32, weights [B,T] float32), padded on the right to the smallest bucket that fits."""
  longest = max(len(row.tokens) for row in demonstrations)
  length = next((bucket for bucket in buckets if bucket >= longest), None)
  if length is None:
    raise ValueError(f'a demonstration of {longest} tokens does not fit in buckets {buckets}')
  tokens = np.zeros((len(demonstrations), length), np.int32)
  weights = np.zeros((len(demonstrations), length), np.float32)
  for row, demonstration in enumerate(demonstrations):
    tokens[row, :len(demonstration.tokens)] = demonstration.tokens
    weights[row, :len(demonstration.weights)] = demonstration.weights
  return tokens, weights
