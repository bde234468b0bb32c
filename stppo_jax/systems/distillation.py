"""On-policy distillation: a teacher's log-probs of the sampled tokens as an advantage per token."""

import dataclasses
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp

from stppo_jax.algorithms import demonstrations
from stppo_jax.algorithms import losses
from stppo_jax.algorithms import segments
from stppo_jax.algorithms.variant import BaseVariant
from stppo_jax.algorithms.variant import Estimator
from stppo_jax.algorithms.variant import TransformSpec
from stppo_jax.types import TurnBatch

State = TypeVar('State')  # training.state.TrainState


def token_advantages(
    teacher_logp: jax.Array, old_logp: jax.Array, action_mask: jax.Array
) -> jax.Array:
  """Returns the advantages [B,T] of tokens that the policy sampled; 0 outside the agent's tokens.

  A_t = log pi_teacher(y_t | s_t) - log pi_old(y_t | s_t)

  The mean of -A_t over the policy's tokens is KL(pi_old || pi_teacher), the reverse KL. At the old
  policy, the mean of A_t grad log pi(y_t | s_t) is minus the gradient of this KL in the state s_t.
  States are constant, which is a discount of 0.

  Source: tinker-cookbook 9dfcc3a2, `incorporate_kl_penalty`. slime 1dda039b9 and verl 624b824a8
  with `use_policy_gradient` and k1 have the same advantage. TRL's DistillationTrainer takes
  the gradient over the whole vocabulary instead.
  Choice: the advantage is within +-20, because a server may report an impossible token as -9999.
  """
  chex.assert_equal_shape([teacher_logp, old_logp, action_mask])
  gap = segments.bounded(teacher_logp - old_logp)
  return jnp.where(action_mask > 0, gap, 0)


def add_advantages(
    spec: TransformSpec, state: State, batch: TurnBatch
) -> tuple[State, TurnBatch, dict[str, jax.Array]]:
  """Adds a teacher's advantages to those of the variant, a transform of `training.transforms`."""
  sampled_mask = demonstrations.sampled_mask(batch)
  assert batch.teacher_logp is not None
  gap = token_advantages(batch.teacher_logp, batch.old_logp, sampled_mask)
  metrics = {'actor/teacher_kl': -losses.aggregate(gap, sampled_mask, 'token-mean')}
  with_teacher = batch.advantages + spec.teacher_coef * gap
  return state, dataclasses.replace(batch, advantages=with_teacher), metrics


def no_advantage(batch: TurnBatch, variant: BaseVariant) -> tuple[jax.Array, jax.Array]:
  """Returns 0 for all tokens, for runs whose advantages come from a teacher alone."""
  del variant
  if batch.teacher_logp is None:
    raise ValueError("advantage 'none' needs batch.teacher_logp: the batch has no teacher")
  zeros = jnp.zeros_like(batch.rewards)
  return zeros, zeros


NO_ADVANTAGE = Estimator(no_advantage)
