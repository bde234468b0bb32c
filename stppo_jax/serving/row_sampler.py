"""A sampler whose rows each have a temperature and a top_p of their own: settings in, tokens out.

The programs of `rollout.sampler` with another draw: numbers of a request instead of constants of a
run. A row without a cut draws the same token, with the same log-prob, as the sampler of a run does.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling


class RowSampler(sampler_lib.Sampler):
  """`rollout.sampler.Sampler` for requests; `settings` [B,3] as in `sample_rows`.

  Stop strings differ between requests: the scheduler looks for them, and calls are short.
  """

  def decode(  # type: ignore[override]
      self,
      params,
      context: sampler_lib.Context,
      rows: sampler_lib.Rows,
      steps: int,
      enough: int,
      settings: np.ndarray,
  ) -> tuple[sampler_lib.Context, sampler_lib.Sampled]:
    """Samples as `Sampler.decode`, with each row's settings."""
    until = sampler_lib.Until(
        np.int32(min(steps, self.steps)), np.int32(enough), np.asarray(settings, np.float32)
    )
    return self._decode(params, context, rows, until, self._ends)

  def _sample_function(self, distribution):
    """Returns (logits, keys, settings) -> (token, logp); only `top_k` is the same for all rows."""
    draw = functools.partial(sample_rows, top_k=distribution.top_k)
    if self.row_sharding is None:
      return draw

    def sample(logits, keys, settings):  # Choice: one gather of logits [B,V]; it serves any row
      logits = logits.astype(jnp.float32)[:, : self.vocab_size]
      return draw(jax.lax.with_sharding_constraint(logits, self.row_sharding), keys, settings)

    return sample


def sample_rows(
    logits: jax.Array, keys: jax.Array, settings: jax.Array, top_k: int = 0
) -> tuple[jax.Array, jax.Array]:
  """Draws a token per row: logits [B,V], keys [B], settings [B,3] -> (token [B], logp [B]).

  The settings are temperature, top_p, and 1 for the model's plain log-prob, which is neither
  tempered nor cut, or 0 for that of the distribution that was drawn from. Each row is as
  `sampling.sample_token` with its own, whatever the other rows ask for. Cut rows cost a sort, and
  only a call that has one pays for it.
  """
  chex.assert_shape(settings, (logits.shape[0], 3))
  logits = logits.astype(jnp.float32)
  temperature, top_p, wants_plain = settings.T
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  whole = sampling.sample_token(scaled, keys, 1.0, top_k, 1.0)
  likeliest = sampling.sample_token(logits, keys, 0.0)
  is_cut = (temperature > 0) & (top_p < 1)
  cut = jax.lax.cond(
      jnp.any(is_cut), lambda: _draw_nucleus(scaled, keys, top_k, top_p), lambda: whole
  )

  def choose(drawn, nucleus, greedy):
    return jnp.where(temperature > 0, jnp.where(is_cut, nucleus, drawn), greedy)

  chosen: Any = jax.tree.map(choose, whole, cut, likeliest)
  token, logp = chosen
  # Greedy rows take theirs from the same table, so that this adds no pass over the logits.
  plain = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
  return token, jnp.where(wants_plain > 0, plain, logp)


def _draw_nucleus(logits, keys, top_k, top_p):
  """Draws from the fewest likeliest tokens that hold the mass top_p [B]."""
  size = logits.shape[1]
  logits, ids = jax.lax.top_k(logits, top_k if 0 < top_k < size else size)
  probs = jax.nn.softmax(logits)
  mass_before = jnp.cumsum(probs, axis=-1) - probs
  first = jnp.arange(logits.shape[1]) == 0  # always kept
  kept = jnp.where(first | (mass_before < top_p[:, None]), logits, -jnp.inf)
  choice, logp = sampling.sample_token(kept, keys)
  return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0].astype(jnp.int32), logp
