"""The metrics of an update, from token arrays; pure.

Names are verl's where the quantity is the same, and `stppo/..` for what is ours. The compiled
functions of `update` call these functions, and add gradient norms and applied steps. Metrics of
single roles are made here, too. summary.py takes means on the host.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variants import Variant
from stppo_jax.training import results
from stppo_jax.training.state import Spec

# A step is skipped if one of these is not finite.
Value = TypeVar('Value')  # the type of a metric
_DECISIVE = (
    'actor/pg_loss',
    'actor/kl_loss',
    'critic/vf_loss',
    'critic/grad_norm',
    'actor/grad_norm',
    'stppo/grad_norm',
    'stppo/bias_norm',
    'stppo/divisor',
    'stppo/grad_factor',
    'stppo/step_scale',
)


def sampler_gap(
    logp: jax.Array,
    behaviour_logp: jax.Array,
    mask: jax.Array,
    turn_ids: jax.Array,
    variant: Variant,
) -> dict[str, jax.Array]:
  """Measures the gap between the trainer's and the sampler's log-probs, as verl 0.9.1 does.

  The metrics rollout_is_.. describe the weights of `off_policy` at the level `variant.rollout_is`,
  before they are normalised. With level 'none' nothing is weighted, and the metrics describe the
  weights of 'token' without truncation. Mean, deviation and effective sample size (a share of the
  tokens) are over tokens, after truncation. The other metrics depend on the level:

                 maximum and minimum    shares above and below the bounds
  token, turn    after truncation       of the tokens
  sequence..     before truncation      of the sequences
  """
  log_ratio = (logp - behaviour_logp) * mask
  sequence_log_ratio = log_ratio.sum(axis=1)
  rows = mask.any(axis=1)
  token_mean = functools.partial(_mean, over=mask)
  row_mean = functools.partial(_mean, over=rows)
  trainer = -_mean(logp, mask, axis=1)  # log perplexity, as the next
  sampler = -_mean(behaviour_logp, mask, axis=1)
  metrics = {
      'kl': token_mean(-log_ratio),
      'k3_kl': token_mean(jnp.exp(log_ratio) - 1 - log_ratio),
      'logp_diff_mean': token_mean(jnp.abs(log_ratio)),
      'logp_diff_max': jnp.abs(log_ratio).max(),
      'training_ppl': row_mean(jnp.exp(trainer)),
      'rollout_ppl': row_mean(jnp.exp(sampler)),
      'ppl_ratio': row_mean(jnp.exp(trainer - sampler)),
      'chi2_token': token_mean(_squared_ratio(log_ratio)) - 1,
      'chi2_seq': row_mean(_squared_ratio(sequence_log_ratio)) - 1,
  }
  level = variant.rollout_is
  threshold = variant.rollout_is_threshold
  low = variant.rollout_is_low
  if level == 'none':
    level = 'token'
    threshold = jnp.inf
    low = 0.0
  log_w = off_policy.log_weights(logp, behaviour_logp, mask, turn_ids, level)
  used = off_policy.truncated(log_w, threshold, low)
  extremes = used
  over = mask
  if level.startswith('sequence'):
    log_w_below = jnp.minimum(log_w, segments.MAX_LOG_RATIO)
    extremes = jnp.exp(log_w_below)
    lengths = mask.sum(axis=1, keepdims=True)
    over = mask / jnp.maximum(lengths, 1)  # each sequence counts once
  is_agent = mask > 0
  too_high = log_w > jnp.log(threshold)
  too_low = log_w < jnp.log(low or 1 / threshold)
  used_mean = token_mean(used)
  used_square = token_mean(jnp.square(used))
  metrics |= {
      'rollout_is_mean': used_mean,
      'rollout_is_std': jnp.sqrt(_variance(used, mask)),
      'rollout_is_eff_sample_size': jnp.square(used_mean) / jnp.maximum(used_square, 1e-30),
      'rollout_is_max': jnp.where(is_agent, extremes, -jnp.inf).max(),
      'rollout_is_min': jnp.where(is_agent, extremes, jnp.inf).min(),
      'rollout_is_ratio_fraction_high': _mean(too_high, over),
      'rollout_is_ratio_fraction_low': _mean(too_low, over),
  }
  return {f'rollout_corr/{name}': x for name, x in metrics.items()}


def _squared_ratio(log_ratio):
  return jnp.exp(2 * segments.bounded(log_ratio))


def batch_summary(batch: types.TurnBatch, has_values: bool) -> dict[str, jax.Array]:
  """Returns mean, max and min of rewards, values, advantages and returns; means of each role."""
  metrics = _batch_metrics(batch, has_values)
  for role, rows in _by_role(batch):
    metrics |= role_metrics(role, _batch_metrics(rows, has_values))
  return metrics


def _batch_metrics(batch, has_values):
  """Returns the metrics of a batch, over the rows that have agent tokens."""
  mask = batch.action_mask.astype(jnp.float32)
  rows = mask.any(axis=1)
  rewards = batch.rewards * mask
  rewards = rewards.sum(axis=1)
  metrics = _summary('critic/rewards', rewards, rows)
  metrics |= _summary('critic/advantages', batch.advantages, mask)
  metrics |= _summary('critic/returns', batch.returns, mask)
  if has_values:
    metrics |= _summary('critic/values', batch.old_values, mask)
    metrics['critic/vf_explained_var'] = _explained_variance(batch, mask)
  return metrics


def _explained_variance(batch, mask):
  """Returns the share of the returns' variance that the values explain, by verl's formula."""
  num_tokens = mask.sum()
  unbiased = num_tokens / jnp.maximum(num_tokens - 1, 1)
  spread = _variance(batch.returns, mask) * unbiased
  error = _variance(batch.returns - batch.old_values, mask) * unbiased
  return 1 - error / (spread + 1e-5)


def step_summary(
    spec: Spec, batch: types.TurnBatch, weights: filters.LossWeights, step: results.PolicyStep
) -> dict[str, jax.Array]:
  """Returns losses, clip fractions and ratio spreads of one optimizer step, from per-token data.

  The losses of the roles (role/<name>/pg_loss) add up to that of all.
  """
  metrics = _step_metrics(spec, batch, weights, step)
  if step.sums.num_pairs is not None:
    metrics['stppo/pairs'] = step.sums.num_pairs
  if weights.imitation is not None and step.sums.imitation_loss is not None:
    has_demonstrations = weights.imitation.any()
    imitation_loss = jnp.where(has_demonstrations, step.sums.imitation_loss, jnp.nan)
    metrics['actor/imitation_loss'] = imitation_loss
  for role, rows in _by_role(batch):
    is_role = rows.action_mask.any(axis=1)
    pg_loss = jnp.sum(step.sums.row_losses * is_role)
    role_sums = step.sums._replace(pg_loss=pg_loss)
    role_step = step._replace(sums=role_sums)
    metrics |= role_metrics(role, _step_metrics(spec, rows, weights, role_step))
  return metrics


def _step_metrics(spec, batch, weights, step):
  """Returns the metrics of a step, over the agent tokens of the batch.

  Clip fractions and `ppo_kl` are over the tokens that the policy's loss counts, as in verl.
  """
  tokens = step.tokens
  mask = batch.action_mask.astype(jnp.float32)
  counted = mask if batch.loss_mask is None else batch.loss_mask
  log_ratio = (tokens.logp - batch.old_logp) * mask
  log_ratio = segments.bounded(log_ratio)
  sampled = batch.old_logp if batch.behaviour_logp is None else batch.behaviour_logp
  is_too_far = _is_too_far(spec.variant, batch, tokens)
  metrics = {
      'actor/pg_loss': step.sums.pg_loss,
      'actor/pg_clipfrac': _mean(tokens.clipped & ~is_too_far, counted),
      'actor/pg_clipfrac_lower': _mean(is_too_far, counted),
      'actor/ppo_kl': _mean(-log_ratio, counted),
      'actor/entropy': _mean(tokens.entropy, mask),
      'stppo/ess_share': off_policy.effective_share(tokens.logp, sampled, mask),
  }
  if tokens.kl is not None:
    metrics['actor/kl_loss'] = jnp.sum(tokens.kl * weights.token)
    metrics['stppo/ref_kl'] = _mean(tokens.kl, mask)
  for level in segments.LEVELS:
    ids, num_segments = segments.segment_ids(level, batch.action_mask, batch.turn_ids)
    ratio = segments.importance_ratio(
        tokens.logp, batch.old_logp, batch.action_mask, ids, num_segments
    )
    variance = _variance(ratio, mask)
    metrics[f'stppo/ratio_std_{level}'] = jnp.sqrt(variance)
  is_positive = batch.advantages >= 0
  for turn in range(1, spec.num_logged_turns + 1):
    in_turn = (batch.turn_ids == turn) & (counted > 0)
    clipped = tokens.clipped
    metrics[f'stppo/clipfrac_turn{turn}_pos'] = _mean(clipped, in_turn & is_positive)
    metrics[f'stppo/clipfrac_turn{turn}_neg'] = _mean(clipped, in_turn & ~is_positive)
  if spec.has_values:
    metrics |= _value_metrics(spec.variant, batch, mask, step.values)
  return metrics


def is_finite(metrics: Mapping[str, jax.Array]) -> jax.Array:
  """Returns whether the losses, norms and divisor of a step are finite, so that it is applied."""
  decisive = [metrics[name] for name in _DECISIVE if name in metrics]
  return jnp.isfinite(jnp.stack(decisive)).all()


def _value_metrics(variant, batch, mask, tokens):
  """Returns the metrics of the critic in a step."""
  values = tokens.values
  loss = tokens.loss
  metrics = {'critic/vf_loss': _mean(loss, mask), 'critic/vpred_mean': _mean(values, mask)}
  if variant.value_clip:
    unclipped_loss = losses.value_loss(values, batch.old_values, batch.returns)
    metrics['critic/vf_clipfrac'] = _mean(loss > unclipped_loss, mask)
  return metrics


def _is_too_far(variant, batch, tokens):
  """Returns which tokens [B,T] the dual clip stopped."""
  if not variant.dual_clip:
    return jnp.zeros_like(tokens.clipped)
  is_negative = correction.advantages_in_min(batch, variant) < 0
  is_above = tokens.ratio > variant.dual_clip
  return tokens.clipped & is_negative & is_above


# --- Roles ----------------------------------------------------------------------------------------


# Metrics of an update -> their names below role/<role>/.
ROLE_NAMES = {
    'actor/pg_loss': 'pg_loss',
    'actor/pg_clipfrac': 'pg_clipfrac',
    'actor/ppo_kl': 'ppo_kl',
    'actor/entropy': 'entropy',
    'critic/vf_loss': 'vf_loss',
    'critic/vf_explained_var': 'vf_explained_var',
    'critic/advantages/mean': 'advantages/mean',
    'critic/returns/mean': 'returns/mean',
    'critic/values/mean': 'values/mean',
    'stppo/step_norm': 'step_norm',
    'stppo/grad_norm': 'grad_norm',
}


def role_metrics(role: str, metrics: Mapping[str, Value]) -> dict[str, Value]:
  """Returns the metrics of the rows or of the policy of a role, under the role's name."""
  chosen = {}
  for name, name_of_role in ROLE_NAMES.items():
    if name in metrics:
      chosen[f'role/{role}/{name_of_role}'] = metrics[name]
  return chosen


def _by_role(batch):
  """Yields (role, the batch in which only its rows have agent tokens); nothing for one agent."""
  for role, rows in (batch.roles or {}).items():
    is_role = rows[:, None]
    action_mask = batch.action_mask * is_role
    loss_mask = None if batch.loss_mask is None else batch.loss_mask * is_role
    yield role, dataclasses.replace(batch, action_mask=action_mask, loss_mask=loss_mask)


def _mean(x, over, axis=None):
  total = jnp.sum(x * over, axis)
  count = over.sum(axis)
  return total / jnp.maximum(count, 1)


def _summary(name, x, over):
  """Returns {name/mean, name/max, name/min} of x where `over` is not 0."""
  is_counted = over > 0
  return {
      f'{name}/mean': _mean(x, over),
      f'{name}/max': jnp.where(is_counted, x, -jnp.inf).max(),
      f'{name}/min': jnp.where(is_counted, x, jnp.inf).min(),
  }


def _variance(x, over):
  mean = _mean(x, over)
  return _mean(jnp.square(x - mean), over)
