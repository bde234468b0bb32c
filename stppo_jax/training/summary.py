"""The metrics of an update from those of its optimizer steps, on the host."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import NamedTuple

from jax.typing import ArrayLike
import numpy as np

from stppo_jax import types
from stppo_jax.rollout import batching
from stppo_jax.training import diagnostics
from stppo_jax.training.packing import OptimizerStep

_FACTOR = 'stppo/applied_factor'
_MAX_STEPS = 8  # the first steps of an update have a metric for the factor
# NaN in a step without clipping, if returns do not vary, and in a step without demonstrations.
_MAY_BE_UNDEFINED = {'stppo/cos_g_c', 'critic/vf_explained_var', 'actor/imitation_loss'}


class PolicyUpdate(NamedTuple):
  """What an update of one policy was computed from, and what it measured."""

  policy: str  # its name, see `Learners`
  episodes: list[types.Episode]  # in the order of the batch's rows
  batch: types.TurnBatch
  steps: list[OptimizerStep]
  metrics: dict[str, float]  # the batch's numbers
  step_metrics: list[types.StepMetrics]  # one per optimizer step

  @property
  def has_tokens(self) -> bool:
    """Whether anything was trained on: a role may never have moved."""
    return any(map(batching.trained_length, self.episodes))


def update_summary(policy_updates: Sequence[PolicyUpdate]) -> dict[str, float]:
  """Returns the metrics of an update: means over its policies and their optimizer steps.

  The factor by which the division changed a step is also given as largest, smallest and per step,
  because its mean hides a step that was lost. A policy without tokens does not count.
  """
  counted = [part for part in policy_updates if part.has_tokens] or list(policy_updates)
  batches = [part.metrics for part in counted]
  metrics = means(batches)
  for name in metrics:  # extremes of several policies
    if name.endswith(('/max', '_max')):
      metrics[name] = max(float(batch[name]) for batch in batches)
    elif name.endswith(('/min', '_min')):
      metrics[name] = min(float(batch[name]) for batch in batches)
  steps = []
  for part in counted:
    own_steps = [step.metrics for step in part.step_metrics]
    steps += own_steps
    if part.policy and part.has_tokens:
      own_metrics = means([part.metrics]) | means(own_steps)
      metrics |= diagnostics.role_metrics(part.policy, own_metrics)
  metrics |= means(steps)
  if _FACTOR in metrics:
    factors = [float(step[_FACTOR]) for step in steps]
    metrics[f'{_FACTOR}_max'] = max(factors)
    metrics[f'{_FACTOR}_min'] = min(factors)
    by_step = zip(*(part.step_metrics for part in counted), strict=True)
    for i, same_step in enumerate(itertools.islice(by_step, _MAX_STEPS), start=1):
      factors = [float(step.metrics[_FACTOR]) for step in same_step]
      metrics[f'{_FACTOR}_step{i}'] = sum(factors) / len(factors)
  # The number of steps skipped in a row.
  metrics['actor/skipped'] = int(max(step['actor/skipped'] for step in steps))
  return metrics


def means(parts: Sequence[Mapping[str, ArrayLike]]) -> dict[str, float]:
  """Returns the mean of each metric over the parts, which all have the same metrics.

  NaN does not count in the metrics of `_MAY_BE_UNDEFINED`. If one of them is NaN in all parts, it
  is left out.
  """
  result = {}
  for name in parts[0]:
    values = np.array([part[name] for part in parts], float)
    if name in _MAY_BE_UNDEFINED:
      values = values[~np.isnan(values)]
    if len(values):
      result[name] = float(values.mean())
  return result
