"""Transforms of an annotated batch, which give it advantages and the weights of its tokens.

A transform is a function (spec, state, batch) -> (state, batch, metrics). TRANSFORMS has all, in
the order in which `update.with_advantages` runs them. A system adds a line.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax.algorithms import advantages
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import losses
from stppo_jax.training.state import Spec
from stppo_jax.training.state import TrainState
from stppo_jax.types import TurnBatch

Metrics = dict[str, jax.Array]
Transform = Callable[[Spec, TrainState, TurnBatch], tuple[TrainState, TurnBatch, Metrics]]


def penalise_kl(
    spec: Spec, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Subtracts the KL penalty from the rewards, and adapts its coefficient.

  The KL is that of the policy before the update, whose log-probs are not the sampler's: the sampler
  may be older, or draw from a part of the distribution (`rollout.top_p`). With kl_in 'loss' the
  rewards stay, and the optimizer steps add the penalty.
  """
  variant = spec.variant
  mask = batch.action_mask
  metrics = {}
  logp = batch.old_logp if batch.policy_logp is None else batch.policy_logp
  kl = losses.kl(logp, batch.ref_logp, variant.kl_estimator)
  kl *= mask
  batch = dataclasses.replace(batch, policy_logp=None)
  episode_ids = batch.episode_ids
  # Over sequences, as in verl.
  mean_kl = losses.aggregate(kl, mask, 'seq-mean-token-mean', episode_ids=episode_ids)
  if variant.kl_in == 'reward':
    metrics['actor/reward_kl_penalty'] = mean_kl
    metrics['actor/reward_kl_penalty_coeff'] = state.kl_coef
    rewards = batch.rewards - state.kl_coef * kl
    batch = dataclasses.replace(batch, rewards=rewards)
  if variant.kl_target:
    num_episodes = losses.first_rows(mask, episode_ids).sum()
    kl_coef = losses.adaptive_kl(
        state.kl_coef, mean_kl, variant.kl_target, variant.kl_horizon, num_episodes
    )
    state = dataclasses.replace(state, kl_coef=kl_coef)
  if variant.kl_in == 'loss':
    metrics['actor/kl_coef'] = state.kl_coef  # used by the next steps
  return state, batch, metrics


def label_segments(
    spec: Spec, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Adds the labels of a custom ratio."""
  labels = spec.variant.ratio(batch, spec.variant)  # type: ignore[operator]
  return state, dataclasses.replace(batch, labels=labels), {}


def estimate_advantages(
    spec: Spec, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Adds advantages and returns by the variant's estimator."""
  return state, advantages.estimate(batch, spec.variant), {}


def filter_tokens(
    spec: Spec, state: TrainState, batch: TurnBatch
) -> tuple[TrainState, TurnBatch, Metrics]:
  """Drops and weights tokens of the policy's loss."""
  batch = filters.apply(batch, spec.variant)
  metrics = {}
  if batch.loss_mask is not None:
    num_tokens = jnp.maximum(batch.action_mask.sum(), 1)
    counted = batch.loss_mask.sum() / num_tokens
    metrics['stppo/dropped_tokens'] = 1 - counted
  return state, batch, metrics


# Whether a run needs the transform, and the transform or 'module:attribute'. Such a module is
# imported when a run needs it. What a run needs depends on its settings alone, never on numbers.
TRANSFORMS: tuple[tuple[Callable[[Spec, TrainState, TurnBatch], bool], Transform | str], ...] = (
    (
        lambda spec, state, batch: state.score_moments is not None,
        'stppo_jax.systems.ppo_max:normalise_scores',
    ),
    (lambda spec, state, batch: spec.variant.kl_in != 'none', penalise_kl),
    (lambda spec, state, batch: callable(spec.variant.ratio), label_segments),
    (lambda spec, state, batch: True, estimate_advantages),
    (
        lambda spec, state, batch: batch.teacher_logp is not None,
        'stppo_jax.systems.distillation:add_advantages',
    ),
    (lambda spec, state, batch: True, filter_tokens),
    (
        lambda spec, state, batch: spec.has_values and spec.variant.value_loss == 'hl_gauss',
        'stppo_jax.systems.hl_gauss:measure_returns',
    ),
)
