"""A critic of bins (HL-Gauss): it outputs the logits of bins, whose mean is the value.

The outputs are the logits [B,T,n] of n bins of equal width that cover the support from value_low to
value_high. Source: the critic of Hyper++ (arXiv 2512.14202, authors' code, hl_gauss.py), after
Farebrother et al. (arXiv 2403.03950).
"""

import itertools
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from stppo_jax.algorithms import losses
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import TransformSpec
from stppo_jax.algorithms.variant import ValueHead
from stppo_jax.types import TurnBatch

State = TypeVar('State')  # training.state.TrainState
SMOOTHING = 0.75  # standard deviation of a target's Gaussian, in widths of a bin
# Returns should stay this many bins away from each end of the support: four standard deviations.
MARGIN = 4 * SMOOTHING


def values(outputs: jax.Array, variant: BaseVariant) -> jax.Array:
  """Returns the values [B,T] that the value head's outputs stand for.

  V = sum_k softmax(logits)_k c_k,   c_k the centre of bin k
  """
  low = variant.value_low
  high = variant.value_high
  num_bins = outputs.shape[-1]
  edges = _edges(low, high, num_bins)
  width = edges[1] - edges[0]
  centres = edges[:-1] + width / 2
  probabilities = jax.nn.softmax(outputs)
  parts = probabilities * centres
  return parts.sum(axis=-1)


def loss(
    outputs: jax.Array, old_values: jax.Array, returns: jax.Array, variant: BaseVariant
) -> jax.Array:
  """Returns the cross-entropy [B,T] of the bins to `gaussian_targets` of the returns.

  Its least value is the entropy of the targets, and not 0.
  """
  del old_values
  chex.assert_equal_shape_prefix([outputs, returns], 2)
  low = variant.value_low
  high = variant.value_high
  num_bins = outputs.shape[-1]
  targets = gaussian_targets(returns, low, high, num_bins)
  return optax.losses.softmax_cross_entropy(outputs, targets)


def gaussian_targets(returns: jax.Array, low: float, high: float, num_bins: int) -> jax.Array:
  """Returns the probabilities [...,num_bins] of the bins for returns [...] (HL-Gauss).

  p_k(y) = (Phi((b_{k+1} - y) / s) - Phi((b_k - y) / s)) / (their sum over k),   s = 0.75 width

  b_k are the edges of the bins, Phi is the normal distribution function, and y is clipped to the
  support. Where y is at least `MARGIN` bins from the ends, the mean of the bins is y to 1.2e-4 of
  the width of a bin. On an end it is off by .69 of this width.
  """
  edges = _edges(low, high, num_bins)
  width = (high - low) / num_bins
  deviation = SMOOTHING * width
  y = jnp.clip(returns, low, high)
  y = y[..., None]
  distance = (edges - y) / deviation
  below = jax.scipy.stats.norm.cdf(distance)
  mass = jnp.diff(below, axis=-1)
  total = mass.sum(axis=-1, keepdims=True)
  return mass / total


def outside_share(returns: jax.Array, action_mask: jax.Array, variant: BaseVariant) -> jax.Array:
  """Returns the share of the agent's tokens whose return is within `MARGIN` bins of an end."""
  low, high = inner_support(variant)
  is_below = returns < low
  is_above = returns > high
  is_outside = is_below | is_above
  return losses.aggregate(is_outside, action_mask, 'token-mean')


def measure_returns(
    spec: TransformSpec, state: State, batch: TurnBatch
) -> tuple[State, TurnBatch, dict[str, jax.Array]]:
  """Measures the share of returns near an end of the bins, a transform of `training.transforms`."""
  outside = outside_share(batch.returns, batch.action_mask, spec.variant)
  return state, batch, {'critic/outside_bins': outside}


def inner_support(variant: BaseVariant) -> tuple[float, float]:
  """Returns the lowest and the highest return that the bins represent without an error."""
  low = variant.value_low
  high = variant.value_high
  width = (high - low) / variant.value_bins
  margin = MARGIN * width
  return low + margin, high - margin


def labels(variant: BaseVariant) -> tuple[str, ...]:
  """Returns a name of each bin with its edges. The config.json of a critic's folder has them."""
  edges = _edges(variant.value_low, variant.value_high, variant.value_bins)
  bins = itertools.pairwise(edges)
  return tuple(f'bin from {low:.6g} to {high:.6g}' for low, high in bins)


def _edges(low, high, num_bins):
  return np.linspace(low, high, num_bins + 1)


BINS = ValueHead(labels, values, loss)
