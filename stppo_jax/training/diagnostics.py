"""Metrics of an update, computed inside the compiled functions; pure.

Names are verl's where the quantity is the same, and `stppo/..` for what is ours.
"""

import functools

import jax
import jax.numpy as jnp

from stppo_jax import types
from stppo_jax.algorithms import correction
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import off_policy
from stppo_jax.algorithms import segments
from stppo_jax.training.state import Spec


def sampler_gap(
    logp: jax.Array,
    behaviour_logp: jax.Array,
    mask: jax.Array,
    turn_ids: jax.Array,
    level: str = 'none',
    threshold: float = jnp.inf,
    low: float = 0.0,
) -> dict[str, jax.Array]:
  """Measures the gap between the trainer's and the sampler's log-probs, as verl 0.9.1 does.

  The weights are those of `off_policy`; with level 'none', where nothing is weighted, those of
  'token' without truncation. Mean, deviation and effective sample size (a share of the tokens) are
  of the weights that are used, before they are normalised. At the levels 'token' and 'turn' so are
  maximum and minimum, and shares are of tokens; at those of sequences these are of the weights
  before truncation, and shares are of sequences.
  """
  log_ratio = (logp - behaviour_logp) * mask
  rows = mask.any(axis=1).astype(mask.dtype)
  token_mean = functools.partial(_mean, over=mask)
  row_mean = functools.partial(_mean, over=rows)
  limit = segments.MAX_LOG_RATIO
  trainer = -_per_row(logp, mask)  # log perplexity, as the next
  sampler = -_per_row(behaviour_logp, mask)
  metrics = {
      'kl': token_mean(-log_ratio),
      'k3_kl': token_mean(jnp.exp(log_ratio) - 1 - log_ratio),
      'logp_diff_max': jnp.abs(log_ratio).max(),
      'training_ppl': row_mean(jnp.exp(trainer)),
      'rollout_ppl': row_mean(jnp.exp(sampler)),
      'ppl_ratio': row_mean(jnp.exp(trainer - sampler)),
      'chi2_token': token_mean(jnp.exp(2 * jnp.clip(log_ratio, -limit, limit))) - 1,
      'chi2_seq': row_mean(jnp.exp(2 * jnp.clip(log_ratio.sum(axis=1), -limit, limit))) - 1,
  }
  if level == 'none':
    level, threshold = 'token', jnp.inf
  log_w = off_policy.log_weights(logp, behaviour_logp, mask, turn_ids, level)
  used = off_policy.truncated_weights(logp, behaviour_logp, mask, turn_ids, level, threshold, low)
  for name, x in _weights_summary(log_w, used, mask, level, threshold, low):
    metrics[f'rollout_is_{name}'] = x
  return {f'rollout_corr/{name}': x for name, x in metrics.items()}


def _weights_summary(log_w, used, mask, level, threshold, low):
  """Yields (name, value) of verl's summary of the weights `used`, whose logarithms were log_w."""
  extremes = used
  over = mask
  if level.startswith('sequence'):
    extremes = jnp.exp(jnp.minimum(log_w, segments.MAX_LOG_RATIO))
    over = mask / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)  # each sequence counts once
  used_mean = _mean(used, mask)
  used_square = _mean(jnp.square(used), mask)
  yield 'mean', used_mean
  yield 'std', jnp.sqrt(_mean(jnp.square(used - used_mean), mask))
  yield 'eff_sample_size', jnp.square(used_mean) / jnp.maximum(used_square, 1e-30)
  yield 'max', jnp.where(mask > 0, extremes, -jnp.inf).max()
  yield 'min', jnp.where(mask > 0, extremes, jnp.inf).min()
  yield 'ratio_fraction_high', _mean(log_w > jnp.log(threshold), over)
  yield 'ratio_fraction_low', _mean(log_w < jnp.log(low or 1 / threshold), over)


def batch_summary(batch: types.TurnBatch, mask: jax.Array, spec: Spec) -> dict[str, jax.Array]:
  """Returns mean, max and min of rewards, values, advantages and returns; means of each role."""
  metrics = {}
  token_series = {'advantages': batch.advantages, 'returns': batch.returns}
  if spec.has_values:
    token_series['values'] = batch.old_values
  for name, x in token_series.items():
    metrics |= {
        f'critic/{name}/mean': jnp.sum(x * mask) / jnp.maximum(mask.sum(), 1),
        f'critic/{name}/max': jnp.where(mask > 0, x, -jnp.inf).max(),
        f'critic/{name}/min': jnp.where(mask > 0, x, jnp.inf).min(),
    }
    for role, over in _role_masks(batch, mask):
      metrics[f'role/{role}/{name}/mean'] = _mean(x, over)
  rows = mask.any(axis=1)
  rewards = (batch.rewards * mask).sum(axis=1)
  metrics |= {
      'critic/rewards/mean': jnp.sum(rewards * rows) / jnp.maximum(rows.sum(), 1),
      'critic/rewards/max': jnp.where(rows, rewards, -jnp.inf).max(),
      'critic/rewards/min': jnp.where(rows, rewards, jnp.inf).min(),
  }
  if spec.has_values:
    metrics['critic/vf_explained_var'] = _explained_variance(batch, mask)
    for role, over in _role_masks(batch, mask):
      metrics[f'role/{role}/vf_explained_var'] = _explained_variance(batch, over)
  return metrics


def _explained_variance(batch, mask):
  """Returns the share of the returns' variance that the values explain, by verl's formula."""
  unbiased = mask.sum() / jnp.maximum(mask.sum() - 1, 1)
  spread = _variance(batch.returns, mask) * unbiased
  error = _variance(batch.returns - batch.old_values, mask) * unbiased
  return 1 - error / (spread + 1e-5)


def _role_masks(batch, mask):
  """Yields (role, mask [B,T] of its tokens); nothing where there is one agent."""
  for role, rows in (batch.roles or {}).items():
    yield role, mask * rows[:, None]


def step_summary(
    spec: Spec,
    batch: types.TurnBatch,
    weights: jax.Array,
    policy_weights: jax.Array,
    tokens: dict[str, jax.Array],
) -> dict[str, jax.Array]:
  """Returns losses, clip fractions and ratio spreads of one optimizer step, from per-token data.

  The losses of the roles (role/<name>/pg_loss) add up to that of all. Clip fractions and `ppo_kl`
  are over the tokens that the policy's loss counts, as in verl, the others over all.
  The trainer skips a step in which a metric whose name ends in `_loss` is not finite.
  """
  mask = batch.action_mask.astype(jnp.float32)
  counted = mask if batch.loss_mask is None else batch.loss_mask
  token_mean = functools.partial(_mean, over=mask)
  counted_mean = functools.partial(_mean, over=counted)
  limit = segments.MAX_LOG_RATIO
  log_ratio = jnp.clip((tokens['logp'] - batch.old_logp) * mask, -limit, limit)
  sampled = batch.old_logp if batch.behaviour_logp is None else batch.behaviour_logp
  stopped_far = _stopped_far(spec, batch, tokens)
  metrics = {
      'actor/pg_loss': tokens['pg_loss'],
      'actor/pg_clipfrac': counted_mean(tokens['clipped'] & ~stopped_far),
      'actor/pg_clipfrac_lower': counted_mean(stopped_far),
      'actor/ppo_kl': counted_mean(-log_ratio),
      'actor/entropy': token_mean(tokens['entropy']),
      'stppo/ess_share': off_policy.effective_share(tokens['logp'], sampled, mask),
  }
  if 'kl' in tokens:
    metrics['actor/kl_loss'] = jnp.sum(tokens['kl'] * weights)
    metrics['stppo/ref_kl'] = token_mean(tokens['kl'])
  for level in segments.LEVELS:
    ids, num_segments = segments.segment_ids(level, batch.action_mask, batch.turn_ids)
    ratio = segments.importance_ratio(
        tokens['logp'], batch.old_logp, batch.action_mask, ids, num_segments
    )
    metrics[f'stppo/ratio_std_{level}'] = jnp.sqrt(_variance(ratio, mask))
  for turn in range(1, spec.num_logged_turns + 1):
    for sign, chosen in (('pos', batch.advantages >= 0), ('neg', batch.advantages < 0)):
      of_turn = (batch.turn_ids == turn) & chosen & (counted > 0)
      share = jnp.sum(tokens['clipped'] & of_turn) / jnp.maximum(of_turn.sum(), 1)
      metrics[f'stppo/clipfrac_turn{turn}_{sign}'] = share
  for role, over in _role_masks(batch, mask):
    metrics |= {
        f'role/{role}/pg_loss': _policy_loss(spec, batch, policy_weights * over, tokens),
        f'role/{role}/pg_clipfrac': _mean(tokens['clipped'], over * counted),
        f'role/{role}/ppo_kl': _mean(-log_ratio, over * counted),
        f'role/{role}/entropy': _mean(tokens['entropy'], over),
    }
  if spec.has_values:
    values = tokens['values']
    value_clip = spec.variant.value_clip or None
    loss = losses.value_loss(values, batch.old_values, batch.returns, value_clip)
    metrics['critic/vf_loss'] = token_mean(loss)
    metrics['critic/vpred_mean'] = token_mean(values)
    for role, over in _role_masks(batch, mask):
      metrics[f'role/{role}/vf_loss'] = _mean(loss, over)
    if value_clip is not None:
      unclipped_loss = losses.value_loss(values, batch.old_values, batch.returns)
      metrics['critic/vf_clipfrac'] = token_mean(loss > unclipped_loss)
  return metrics


def _stopped_far(spec, batch, tokens):
  """Returns which tokens [B,T] the dual clip stopped."""
  if not (dual_clip := spec.variant.dual_clip):
    return jnp.zeros_like(tokens['clipped'])
  negative = correction.advantages_in_min(batch, spec.variant) < 0
  return tokens['clipped'] & negative & (tokens['ratio'] > dual_clip)


def _policy_loss(spec, batch, weights, tokens):
  """Returns the policy's loss with these weights [b,T]."""
  _, _, parts = correction.cotangents(tokens['logp'], batch, spec.variant, weights=weights)
  return parts['pg_loss']


def _mean(x, over):
  return jnp.sum(x * over) / jnp.maximum(over.sum(), 1)


def _per_row(x, mask):
  return jnp.sum(x * mask, axis=1) / jnp.maximum(mask.sum(axis=1), 1)


def _variance(x, mask):
  total = jnp.maximum(mask.sum(), 1)
  mean = jnp.sum(x * mask) / total
  return jnp.sum(jnp.square(x - mean) * mask) / total
