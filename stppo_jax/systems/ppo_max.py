"""Score normalisation by the mean and deviation of all episodes so far (PPO-max).

PPO-max (Zheng et al., arXiv 2307.04964, section 5.4) normalises and clips scores by historical
moments. The released script divides by the running deviation alone (`ppo_trainer.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import TransformSpec
from stppo_jax.types import TurnBatch


class ScoreMoments(NamedTuple):
  """The moments of all scores so far, each a scalar."""

  num_scores: jax.Array
  mean: jax.Array
  squares: jax.Array  # sum of the squared deviations from the mean

  @classmethod
  def zero(cls) -> ScoreMoments:
    """Returns the moments of no scores."""
    return cls(*jnp.zeros(3))

  @property
  def deviation(self) -> jax.Array:
    """The sample deviation (n - 1); 1 where the scores differ by rounding only."""
    variance = self.squares / jnp.maximum(self.num_scores - 1, 1)
    deviation = jnp.sqrt(variance)
    has_spread = deviation > types.ROUNDING * jnp.abs(self.mean)
    return jnp.where(has_spread, deviation, 1)

  def merged(self, scores: jax.Array, counts: jax.Array) -> ScoreMoments:
    """Returns the moments with the scores [B] where `counts` [B] is true.

    With n, m, S of the moments before and k, b, T of the scores (Chan, Golub and LeVeque 1979),

      n' = n + k,   m' = m + (b - m) k / n',   S' = S + T + (b - m)^2 n k / n'
    """
    k = counts.sum()
    b = jnp.sum(scores * counts) / jnp.maximum(k, 1)
    within = jnp.sum(jnp.square(scores - b) * counts)
    num_scores = self.num_scores + k
    share = k / jnp.maximum(num_scores, 1)
    gap = b - self.mean
    between = jnp.square(gap) * self.num_scores * share
    mean = self.mean + gap * share
    squares = self.squares + within + between
    return ScoreMoments(num_scores, mean, squares)


def normalise_scores(
    spec: TransformSpec, state: Any, batch: TurnBatch
) -> tuple[Any, TurnBatch, dict[str, jax.Array]]:
  """Normalises the rewards of a batch, a transform of `training.transforms`."""
  batch, moments = normalise(batch, state.score_moments, spec.variant)
  state = dataclasses.replace(state, score_moments=moments)
  metrics = {
      'critic/score_moments/mean': moments.mean,
      'critic/score_moments/deviation': moments.deviation,
  }
  return state, batch, metrics


def normalise(
    batch: TurnBatch, moments: ScoreMoments, variant: BaseVariant
) -> tuple[TurnBatch, ScoreMoments]:
  """Returns the batch with normalised rewards, and the moments with its scores.

    s' = s / deviation ('scale') or (s - mean) / deviation ('normalise'), clipped at +-score_clip

  The moments include this batch. Choice: if several turns have rewards, the deviation divides every
  reward, and the last agent token gets the rest of s'. Choice: each row counts once, and rows
  without agent tokens do not count.
  """
  mask = batch.action_mask
  rewards = batch.rewards * mask
  scores = rewards.sum(axis=1)
  moments = moments.merged(scores, mask.any(axis=1))
  scaled = scores / moments.deviation
  target = scaled
  if variant.score_norm == 'normalise':
    target -= moments.mean / moments.deviation
  if variant.score_clip:
    bound = variant.score_clip
    target = jnp.clip(target, -bound, bound)
  columns = jnp.arange(mask.shape[1])
  agent_columns = jnp.where(mask > 0, columns, -1)
  last = agent_columns.max(axis=1)
  is_last = columns == last[:, None]
  rest = (target - scaled)[:, None]
  rewards /= moments.deviation
  rewards += jnp.where(is_last, rest, 0)
  return dataclasses.replace(batch, rewards=rewards), moments
