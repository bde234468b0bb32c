"""GRAO (arXiv 2508.07750, paper): samples are weighed against a reference answer."""

from typing import Protocol

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import losses
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.types import TurnBatch


class GraoFields(Protocol):
  """The fields that GRAO adds to a Variant."""

  @property
  def grao_lambda(self) -> float:
    """Weight of the samples' distance from the reference."""

  @property
  def grao_beta(self) -> float:
    """Weight of the reference."""


def grao(batch: TurnBatch, variant: GraoFields) -> tuple[jax.Array, jax.Array]:
  """Returns the weights of log-probs in GRAO (arXiv 2508.07750, eq. 3; paper), for a GraoVariant.

  With e_i and m the mean log-probs of sample i of G and of the reference answer y, a demonstration,

    J = (1/G) sum_i A_i e_i + beta A_y m + lambda (1/G) sum_i A_i (e_i - m)
      = (1/G) sum_i (1 + lambda) A_i e_i + (beta A_y - lambda mean_i A_i) m

  These are the weights of rows with ratio 'none' and aggregation 'seq-mean-token-mean', times the
  rows of the group over G, or over its number of references. Without a reference, the weights are
  (1 + lambda) times the z-scores.

  Choice: one z-score over the samples and the reference, as the text says. Eq. 4 has the samples
  alone, and gives a group of equal scores no spread to divide by. Choice: m is the mean over
  several references. The list of components in the paper disagrees with eq. 3. The gradient in its
  proof agrees with it.
  """
  scores, group_ids, _ = advantages.episode_scores(batch)
  z_scores = advantages.group_zscore(scores, group_ids)
  is_reference = jnp.zeros(len(scores), bool)
  if batch.demonstrated is not None:
    is_reference = batch.demonstrated > 0
  same = losses.is_same(group_ids)
  is_sample = same & ~is_reference[None, :]
  num_rows = same.sum(axis=1)
  num_samples = is_sample.sum(axis=1)
  num_references = num_rows - num_samples
  num_samples = jnp.maximum(num_samples, 1)
  total = advantages.over_groups(jnp.sum, z_scores, is_sample)
  mean = total / num_samples
  sample_weights = (1 + variant.grao_lambda) * z_scores
  sample_weights /= num_samples
  reference_weights = variant.grao_beta * z_scores - variant.grao_lambda * mean
  reference_weights /= jnp.maximum(num_references, 1)
  weights = jnp.where(is_reference, reference_weights, sample_weights)
  weights *= num_rows
  # The first row of an episode has its weight, and the others have 0.
  weights = losses.episode_sums(weights[:, None], batch.episode_ids)
  weights = weights[:, None] * batch.action_mask
  return weights, weights


GRAO = Estimator(grao, needs_groups=True, uses_demonstrations=True, compares_scores=False)
