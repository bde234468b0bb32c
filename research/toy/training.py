"""Trains a small policy on the toy task with the package's own update, in one compiled program.

Overrides in, arrays [seeds, updates] out:

  metrics = training.run({'algorithm.variant': 'st_ppo', 'train.epochs': 4}, num_seeds=64)

An update does what `training.learner.Learners.update` does, in the same order, with the same code:
sample with an older policy, annotate, advantages and filters (`update.with_advantages`), optimizer
steps (`optimizer_step.take_step`). Only models, task and sampler are small: task.py is the task,
and the models are perceptrons over its window of features. Configs that differ only in numbers
share a program.

Choice: seeds are computed in blocks of a fixed size, so that a seed's numbers do not depend on how
many others there are.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from research.study import measures
from research.toy import settings as toy_settings
from research.toy import task
from stppo_jax.algorithms import filters
from stppo_jax.algorithms import objectives
from stppo_jax.models import decoder
from stppo_jax.training import diagnostics
from stppo_jax.training import optimizer_step
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import TurnBatch

BLOCK = 16  # seeds computed at once
# Metrics of an update that are kept, named as in metrics.jsonl.
KEPT = {*measures.SERIES.values(), 'rollout_corr/kl'}


def run(
    settings: Mapping[str, Any], num_seeds: int = 64, first_seed: int = 0
) -> dict[str, np.ndarray]:
  """Trains one run per seed; returns metrics [seeds, updates].

  The evaluations `val-core/all/em` (greedy) and `toy/success` (sampled) are exact and have the
  shape [seeds, updates + 1]. Column n is after n updates. `toy/nonfinite` is the largest number of
  steps in a row that were skipped up to this update because gradients were not finite.

  Args:
    settings: overrides {path: value}.
    num_seeds: runs.
    first_seed: the seeds are consecutive.
  """
  config = toy_settings.make(settings)
  structure, numbers = toy_settings.split(config)
  blocks = []
  for first in range(first_seed, first_seed + num_seeds, BLOCK):
    seeds = np.arange(first, first + BLOCK, dtype=np.uint32)
    world, actor = warm_start(config.warm, first)
    metrics = _trained(structure, numbers, seeds, world, actor)
    blocks.append(jax.device_get(metrics))
  joined = jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)
  return {name: x[:num_seeds] for name, x in joined.items()}


@functools.lru_cache(maxsize=64)
def warm_start(warm: toy_settings.WarmStart, first_seed: int) -> tuple[task.World, Any]:
  """Returns the tasks and first policies of a block of seeds; configs share them."""
  seeds = np.arange(first_seed, first_seed + BLOCK, dtype=np.uint32)
  # Drawn on the host, because it takes long to compile.
  starts = [(_world(warm, int(seed)), _untrained(warm, int(seed))) for seed in seeds]
  world, params = jax.tree.map(lambda *parts: np.stack(parts), *starts)
  return world, _warmed(warm, seeds, world, params)


def _world(warm, seed):
  return task.make_world(warm.chain, seed, warm.reliability)


@functools.partial(jax.jit, static_argnums=0)
def _warmed(warm, seeds, world, params):
  return jax.vmap(functools.partial(_warm, warm))(seeds, world, params)


@functools.partial(jax.jit, static_argnums=0)
def _trained(structure, numbers, seeds, world, actor):
  config = toy_settings.join(structure, numbers)
  return jax.vmap(functools.partial(_train, config))(seeds, world, actor)


def log_probs(params: dict, features: jax.Array) -> jax.Array:
  """Returns the policy's log-probs [..,V+1]."""
  return jax.nn.log_softmax(_perceptron(params, features))


def _perceptron(params, x):
  for layer in ('first', 'second'):
    x = jax.nn.silu(x @ params[layer]['kernel'] + params[layer]['bias'])
  return x @ params['last']['kernel'] + params['last']['bias']


def _untrained(warm, seed):
  """Returns a perceptron with two hidden layers and an output of 0."""
  rng = np.random.default_rng((seed, 1))
  params = {}
  for layer, num_in in (('first', warm.chain.num_features), ('second', warm.hidden)):
    kernel = rng.normal(size=(num_in, warm.hidden)) * (2 / num_in) ** 0.5
    params[layer] = _layer(kernel)
  params['last'] = _layer(np.zeros((warm.hidden, warm.chain.vocabulary + 1)))
  return params


def _layer(kernel):
  return {'kernel': kernel.astype(np.float32), 'bias': np.zeros(kernel.shape[1], np.float32)}


def _warm(warm, seed, world, params):
  """Trains a policy on demonstrations, fresh ones in each step."""
  chain = warm.chain
  num_rows = warm.episodes
  optimizer = optax.adam(optax.linear_schedule(warm.lr, 0.0, warm.steps))
  key = jax.random.fold_in(jax.random.key(seed), 0)

  def loss_of(params, chances):
    questions = task.uniform_key(chain, chances[:num_rows])
    shown = task.demonstrate(chain, world, chances[num_rows:], questions)
    logp = _token_logp(log_probs(params, task.features_of(chain, shown)), shown.tokens)
    return -jnp.sum(logp * shown.mask) / shown.mask.sum()

  def step(carry, n):
    params, state = carry
    size = num_rows + task.num_chances(chain, num_rows)
    chances = jax.random.uniform(jax.random.fold_in(key, n), (size,))
    updates, state = optimizer.update(jax.grad(loss_of)(params, chances), state, params)
    return (optax.apply_updates(params, updates), state), None

  first = (params, optimizer.init(params))
  return jax.lax.scan(step, first, jnp.arange(warm.steps))[0][0]


def _token_logp(scores, tokens):
  """Returns the log-probs of tokens, given those of the vocabulary [..,V+1]."""
  return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]


def _train(config, seed, world, actor):
  """Trains a run; returns its metrics [updates]."""
  spec = make_spec(config)
  # Choice: as in an ordinary run, the critic starts from the policy's layers, with a head of 0.
  head = {'kernel': jnp.zeros((config.warm.hidden, 1)), 'bias': jnp.zeros(1)}
  critic = dict(actor, last=head) if spec.critic is not None else None
  state = train_state.create(spec, actor, critic)
  history = jax.tree.map(lambda x: jnp.broadcast_to(x, (config.history, *x.shape)), actor)
  key = jax.random.fold_in(jax.random.key(seed), 1)
  at_first = _evaluate(config.chain, world, actor)

  def one_update(carry, n):
    state, history = carry
    version = jnp.maximum(n - config.staleness, 0) % config.history
    sampler = jax.tree.map(lambda x: x[version], history)
    state, metrics = run_update(
        config, spec, world, actor, state, sampler, jax.random.fold_in(key, n)
    )
    put = lambda x, new: x.at[(n + 1) % config.history].set(new)
    history = jax.tree.map(put, history, state.actor)
    return (state, history), metrics | _evaluate(config.chain, world, state.actor)

  _, metrics = jax.lax.scan(one_update, (state, history), jnp.arange(config.updates))
  return {
      name: jnp.concatenate((at_first[name][None], x)) if name in at_first else x
      for name, x in metrics.items()
  }


def make_spec(config: toy_settings.ToyConfig) -> train_state.Spec:
  """Returns what `training.update` needs; it does not read the shapes of the models."""

  def optimizer(rate, later=0):
    return train_state.make_adamw(
        rate.lr,
        rate.warmup_steps,
        rate.betas,
        rate.eps,
        rate.weight_decay,
        rate.final_lr,
        rate.num_steps - later,  # it counts its own steps
    )

  hidden = config.warm.hidden
  model = decoder.ModelConfig(config.chain.vocabulary + 1, hidden, 1, 1, 1, hidden, hidden)
  actor_optimizer, actor_lr = optimizer(config.actor, later=config.critic_warmup * config.steps)
  critic_optimizer, critic_lr = optimizer(config.critic)
  return train_state.Spec(
      variant=config.variant,
      actor=model,
      critic=dataclasses.replace(model, head='value') if config.variant.needs_critic else None,
      actor_optimizer=actor_optimizer,
      critic_optimizer=critic_optimizer,
      actor_lr=actor_lr,
      critic_lr=critic_lr,
      micro_batch=1,
      length_buckets=(config.chain.columns,),
      temperature=1.0,
      logp_chunk=None,
      critic_warmup=config.critic_warmup * config.steps,
      num_logged_turns=0,
      actor_clip=config.actor.grad_clip,
      critic_clip=config.critic.grad_clip,
  )


def run_update(
    config: toy_settings.ToyConfig,
    spec: train_state.Spec,
    world: task.World,
    reference: dict,
    state: train_state.TrainState,
    sampler: dict,
    key: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
  """Runs one update on episodes that the policy `sampler` plays."""
  chain = config.chain
  num_groups = config.episodes // config.group_size
  num_play = task.num_chances(chain, config.episodes)
  num_deal = config.epochs * config.episodes
  # All are drawn at once, because each call of the generator takes long to compile.
  chances = jax.random.uniform(key, (num_groups + num_play + num_deal,))
  question_chances, play_chances, deal_chances = jnp.split(
      chances, (num_groups, num_groups + num_play)
  )
  group_ids = jnp.arange(config.episodes) // config.group_size
  questions = task.uniform_key(chain, question_chances)[group_ids]
  scores = functools.partial(log_probs, sampler)
  played = task.play(chain, world, scores, play_chances, questions)
  batch = task.to_batch(chain, played, group_ids)
  features = task.features_of(chain, played)
  batch, metrics = annotate(config, spec, state, reference, batch, played.tokens, features)
  state, batch, credit = update.with_advantages(spec, state, batch)

  def step(state, rows):
    state, metrics, _ = optimizer_step.take_step(
        make_work(
            chain, spec, state, *jax.tree.map(lambda x: x[rows], (batch, played.tokens, features))
        )
    )
    return state, metrics

  state, step_metrics = jax.lax.scan(step, state, deal(deal_chances, config))
  metrics = {k: v for k, v in (metrics | credit).items() if k in KEPT}
  metrics['critic/score/mean'] = played.right[:, -1].mean()
  return state, metrics | _summary(step_metrics)


def deal(chances: jax.Array, config: toy_settings.ToyConfig) -> jax.Array:
  """Returns the rows of each optimizer step [steps, b]; each epoch shuffles all rows again."""
  order = jnp.argsort(chances.reshape(config.epochs, config.episodes), axis=1)
  return jnp.sort(order.reshape(-1, config.mini_batch), axis=1)


def _summary(step_metrics):
  """Returns metrics of an update from those of its steps [steps]."""
  metrics = {k: v.mean() for k, v in step_metrics.items() if k in KEPT}
  if 'stppo/cos_g_c' in metrics:  # NaN in a step without clipping
    metrics['stppo/cos_g_c'] = jnp.nanmean(step_metrics['stppo/cos_g_c'])
  factor = step_metrics['stppo/applied_factor']
  metrics |= {'stppo/applied_factor_max': factor.max(), 'stppo/applied_factor_min': factor.min()}
  return metrics | {'toy/nonfinite': step_metrics['actor/skipped'].max()}


def annotate(
    config: toy_settings.ToyConfig,
    spec: train_state.Spec,
    state: train_state.TrainState,
    reference: dict,
    batch: TurnBatch,
    tokens: jax.Array,
    features: jax.Array,
) -> tuple[TurnBatch, dict[str, jax.Array]]:
  """Fills in old_logp, ref_logp and old_values as `update.annotate` does."""
  variant = config.variant
  mask = batch.action_mask
  row = lambda x: task.to_row(config.chain, x) * mask
  logp = row(_token_logp(log_probs(state.actor, features), tokens))
  ref_logp = logp
  if variant.needs_reference:
    ref_logp = row(_token_logp(log_probs(reference, features), tokens))
  values = jnp.zeros_like(logp)
  if spec.critic is not None:
    values = row(_perceptron(state.critic, features)[..., 0])
  assert batch.behaviour_logp is not None
  metrics = diagnostics.sampler_gap(logp, batch.behaviour_logp, mask, batch.turn_ids, variant)
  old_logp = batch.behaviour_logp if variant.old_logp == 'sampler' else logp
  batch = dataclasses.replace(batch, old_logp=old_logp, ref_logp=ref_logp, old_values=values)
  return batch, metrics


def _evaluate(chain, world, actor):
  """Returns the share of right episodes over all questions, greedy and sampled; exact."""
  ways = task.right_ways(chain, world)
  scores = log_probs(actor, task.features_of(chain, ways))
  logp = jnp.sum(_token_logp(scores, ways.tokens) * ways.mask, axis=(1, 2))
  likeliest = (scores.argmax(axis=-1) == ways.tokens) | ~ways.mask
  return {'val-core/all/em': likeliest.all(axis=(1, 2)).mean(), 'toy/success': jnp.exp(logp).mean()}


def make_work(
    chain: task.Chain,
    spec: train_state.Spec,
    state: train_state.TrainState,
    batch: TurnBatch,
    tokens: jax.Array,
    features: jax.Array,
) -> optimizer_step.StepInputs:
  """Returns the work of an optimizer step on tokens [b,K,S] with features [b,K,S,F]."""

  def policy(actor, layout):
    del layout
    scores = log_probs(actor, features)
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    logp = task.to_row(chain, _token_logp(scores, tokens))
    return objectives.TokenOutputs(logp, entropy=task.to_row(chain, entropy))

  def values(critic, layout):
    del layout
    return task.to_row(chain, _perceptron(critic, features)[..., 0])

  weights = filters.weights(batch, spec.variant)
  return optimizer_step.StepInputs(spec, state, batch, weights, policy, values)
