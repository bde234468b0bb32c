"""Probe environments with known answers, run against every row of VARIANTS.

Each probe isolates one part of an algorithm, after the probe environments of AgileRL. A policy that
is a table plays them. The package's own functions compute advantages and optimizer steps. All
probes and seeds of a variant are one compiled program.

An episode has up to two turns of two tokens, each after an observation of 0 or 1:

  column   0            1      2      3             4      5
           observation  token  token  observation'  token  token

  one_turn      There is one turn. A token that repeats the observation earns 1/2.
  first_pays    There are two turns, and only the first one earns anything, by the same rule.
  masked        Only the second turn earns, by tokens that repeat its observation. Parameters that
                belong to the observation's own log-probs must not change at all.
  constant      Every episode earns 1. The policy must stay where it is.
  equal_groups  The question alone decides the score. The policy must stay where it is.
"""

import dataclasses
import functools
from typing import NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.algorithms import filters
from stppo_jax.algorithms import objectives
from stppo_jax.algorithms import variants
from stppo_jax.models import decoder
from stppo_jax.training import optimizer_step
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import TurnBatch

PROBES = ('one_turn', 'first_pays', 'masked', 'constant', 'equal_groups')
LEARNABLE = PROBES[:3]
SEEDS = 3
ACTIONS = 3
GROUPS, GROUP = 4, 8
ROWS = GROUPS * GROUP
UPDATES, STEPS = 80, 2
COLUMNS = 6
PLACES = np.array([1, 2, 4, 5])  # columns of the agent's tokens
NUM_STATES = 4 * 2 + 1  # a place and its observation; the last one is any observation column
LR = 0.05
GOOD = 0.9  # expected score of a learnable probe, from 1/3; the optimum is 1
STILL = 0.12  # largest change of a probability where nothing is to be learned

# (variant, probe) -> the reason why it does not reach the known answer.
MISSES = {
    (name, 'equal_groups'): (
        'It compares an episode with the mean of the batch, neither with its group nor with a '
        'value. So the difference between two questions is noise that moves the policy.'
    )
    for name in ('reinforce', 'reinforce_pp')
} | {
    ('superhf', probe): (
        'It imitates the first of equally good episodes, which is a random one. So the policy '
        'moves although nothing is to be learned.'
    )
    for probe in ('constant', 'equal_groups')
}
MISSES['ppo_max', 'equal_groups'] = (
    'Its scores are normalised, and twice as large as those of the question. Until the critic '
    'knows them, they move the policy by .13. With a warm-up of the critic, as in PPO-max, it is '
    '.07.'
)
FAST = ('ppo', 'turn_ppo', 's_ppo', 'st_ppo', 'grpo')  # the others are slow tests

# Variant -> the reason why no probe can run it.
NOT_RUN = {'distillation': 'Its advantages are those of a teacher.'}


class ProbesTest(parameterized.TestCase):

  @parameterized.parameters(*FAST)
  @pytest.mark.slow_after(1)
  def test_known_answers(self, name):
    self.check_answers(name)

  @parameterized.parameters(*(x for x in variants.VARIANTS if x not in (*FAST, *NOT_RUN)))
  @pytest.mark.slow
  def test_known_answers_of_other_rows(self, name):
    self.check_answers(name)

  def check_answers(self, name):
    results = run(variants.VARIANTS[name])
    for probe in PROBES:
      number, is_reached = results[probe]
      if (name, probe) in MISSES:
        self.assertFalse(is_reached, f'{name} reaches {probe}: remove it from MISSES')
      else:
        self.assertTrue(is_reached, f'{name} on {probe}: {number:.3f}')

  def test_tables_name_present_rows(self):
    for name, probe in MISSES:
      self.assertIn(name, variants.VARIANTS)
      self.assertIn(probe, PROBES)
    self.assertContainsSubset(NOT_RUN, variants.VARIANTS)


class Outcome(NamedTuple):
  """The worst seed of a variant on a probe."""

  number: float  # expected score, or the largest change of a probability
  is_reached: bool


def run(variant: variants.Variant) -> dict[str, Outcome]:
  """Trains a variant on all probes and seeds; returns {probe: Outcome}."""
  rng = np.random.default_rng(0)
  questions = rng.integers(0, 2, (SEEDS, UPDATES, GROUPS, 2))
  observations = np.repeat(questions, GROUP, axis=2)
  chances = rng.random((SEEDS, UPDATES, ROWS, len(PLACES)), np.float32)
  train = functools.partial(_train, variant)
  over_seeds = jax.vmap(train, in_axes=(None, 0, 0))
  over_probes = jax.vmap(over_seeds, in_axes=(0, None, None))
  indices = jnp.arange(len(PROBES))
  tables = jax.device_get(jax.jit(over_probes)(indices, observations, chances))
  return {probe: _judge(probe, tables[i]) for i, probe in enumerate(PROBES)}


def _judge(probe, tables):
  """Compares the trained tables [seeds,states,actions] with the known answer."""
  shifted = tables - tables.max(axis=-1, keepdims=True)
  chances = np.exp(shifted) / np.exp(shifted).sum(axis=-1, keepdims=True)
  by_place = chances[:, :-1].reshape(SEEDS, 2, 2, 2, ACTIONS)  # seed, turn, place, observation
  is_masked = (tables[:, -1] == 0).all()
  if probe not in LEARNABLE:
    change = float(np.abs(by_place - 1 / ACTIONS).max())
    return Outcome(change, is_masked and change <= STILL)
  turn = 1 if probe == 'masked' else 0
  right = np.stack([by_place[:, turn, :, o, o] for o in range(2)])
  score = float(right.mean(axis=(0, 2)).min())
  return Outcome(score, is_masked and score >= GOOD)


def _train(variant, probe, observations, chances):
  """Trains one table; returns it after all updates."""
  spec = _spec(variant)
  actor = {'table': jnp.zeros((NUM_STATES, ACTIONS))}
  critic = None
  if spec.critic is not None:
    num_outputs = len(variant.value_labels)
    outputs = (num_outputs,) if num_outputs > 1 else ()
    critic = {'table': jnp.zeros((NUM_STATES, *outputs))}
  state = train_state.create(spec, actor, critic)

  def one_update(state, inputs):
    observations, chances = inputs
    state = train_state.extrapolated(state, variant.extrapolation)
    batch, states = _play(probe, state.actor['table'], observations, chances)
    mask = batch.action_mask
    logp = _log_probs(state.actor, batch.tokens, states)[0] * mask
    ref_logp = _log_probs(actor, batch.tokens, states)[0] * mask
    values = jnp.zeros_like(logp)
    if spec.critic is not None:
      values = variant.value_head.values(state.critic['table'][states], variant) * mask
    batch = dataclasses.replace(
        batch,
        old_logp=logp,
        behaviour_logp=logp,
        ref_logp=ref_logp,
        old_values=values,
        old_uniform=_over_actions(spec, state.actor, states).get('uniform'),
    )
    state, batch, _ = update.with_advantages(spec, state, batch)
    for step in range(STEPS):  # whole groups
      rows = slice(step * ROWS // STEPS, (step + 1) * ROWS // STEPS)
      part, part_states = jax.tree.map(lambda x: x[rows], (batch, states))
      state = _take_step(spec, state, part, part_states)
    return state, None

  state, _ = jax.lax.scan(one_update, state, (observations, chances))
  return state.actor['table']


def _take_step(spec, state, batch, states):
  """Takes an optimizer step of the package with tables instead of models."""

  def policy(actor, unused_layout):
    logp, entropy = _log_probs(actor, batch.tokens, states)
    return objectives.TokenOutputs(logp, entropy=entropy, **_over_actions(spec, actor, states))

  def values(critic, unused_layout):
    return critic['table'][states]

  weights = filters.weights(batch, spec.variant)
  work = optimizer_step.StepInputs(spec, state, batch, weights, policy, values)
  return optimizer_step.take_step(work)[0]


def _log_probs(actor, tokens, states):
  """Returns log-probs and entropies [b,T]."""
  scores = jax.nn.log_softmax(actor['table'][states])
  chosen = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(scores) * scores, axis=-1)


def _over_actions(spec, actor, states):
  """Returns what an objective needs of all actions [b,T]; the reference is the uniform policy."""
  mean = jax.nn.log_softmax(actor['table'][states]).mean(axis=-1)
  outputs = {'uniform': jax.lax.stop_gradient(mean), 'reference_kl': -jnp.log(ACTIONS) - mean}
  return {name: x for name, x in outputs.items() if name in spec.variant.needs}


def _play(probe, table, observations, chances):
  """Plays ROWS episodes; returns a TurnBatch and the states [B,T] of its columns."""
  # In equal_groups both turns show the question, so that a critic can know it.
  is_equal = probe == PROBES.index('equal_groups')
  observations = jnp.where(is_equal, observations[:, :1], observations)
  offsets = jnp.arange(4) * 2
  at_places = offsets + jnp.repeat(observations, 2, axis=1)
  probabilities = jax.nn.softmax(table[at_places])
  below = jnp.cumsum(probabilities, axis=-1)[..., :-1] < chances[..., None]
  actions = below.sum(axis=-1)
  tokens = jnp.zeros((ROWS, COLUMNS), jnp.int32).at[:, PLACES].set(actions)
  tokens = tokens.at[:, np.array([0, 3])].set(observations)
  states = jnp.full((ROWS, COLUMNS), NUM_STATES - 1).at[:, PLACES].set(at_places)
  turn_ids = jnp.tile(jnp.array([0, 1, 1, 0, 2, 2]), (ROWS, 1))
  turn_ids = jnp.where((probe == 0) & (turn_ids == 2), 0, turn_ids)
  mask = (turn_ids > 0).astype(jnp.float32)
  right = actions == jnp.repeat(observations, 2, axis=1)
  first = right[:, :2].mean(axis=1)
  second = right[:, 2:].mean(axis=1)
  nothing = jnp.zeros(ROWS)
  one = jnp.ones(ROWS)
  question = observations[:, 0].astype(jnp.float32)
  on_first = jnp.stack([first, first, nothing, nothing, nothing])[probe]
  on_second = jnp.stack([nothing, nothing, second, one, question])[probe]
  zeros = jnp.zeros((ROWS, COLUMNS))
  batch = TurnBatch(
      tokens=tokens,
      action_mask=mask,
      turn_ids=turn_ids,
      rewards=zeros.at[:, 2].set(on_first).at[:, 5].set(on_second),
      old_logp=zeros,
      ref_logp=zeros,
      old_values=zeros,
      advantages=zeros,
      returns=zeros,
      group_ids=jnp.arange(ROWS) // GROUP,
      truncated=nothing,
  )
  return batch, states


@functools.cache
def _spec(variant):
  model = decoder.ModelConfig(ACTIONS, 1, 1, 1, 1, 1, 1)
  optimizer, schedule = train_state.make_adamw(LR, 0, eps=1e-3)
  # The logits of bins have a longer way to go than a value.
  critic_lr = 2 * LR if variant.value_loss == 'mse' else 10 * LR
  critic_optimizer, _ = train_state.make_adamw(critic_lr, 0)
  return train_state.Spec(
      variant=variant,
      actor=model,
      critic=dataclasses.replace(model, head='value') if variant.needs_critic else None,
      actor_optimizer=optimizer,
      critic_optimizer=critic_optimizer,
      actor_lr=schedule,
      critic_lr=schedule,
      micro_batch=1,
      length_buckets=(COLUMNS,),
      temperature=1.0,
      logp_chunk=None,
      critic_warmup=0,
      num_logged_turns=0,
      actor_clip=1.0,
      critic_clip=1.0,
  )


if __name__ == '__main__':
  absltest.main()
