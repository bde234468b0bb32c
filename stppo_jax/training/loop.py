"""The training loop, readable as a story; the only place that ties all parts together.

  questions -> episodes (host) -> one TurnBatch (device) -> old log-probs and values -> advantages
  -> a few optimizer steps -> metrics, and now and then an evaluation and a checkpoint
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import time

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import config as schema
from stppo_jax import evaluation
from stppo_jax import metrics as metrics_lib
from stppo_jax import report
from stppo_jax import tasks as task_files
from stppo_jax.algorithms import variants
from stppo_jax.models import convert
from stppo_jax.models import lora
from stppo_jax.rollout import batching
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.training import checkpoint
from stppo_jax.training import parts
from stppo_jax.training import sharding
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import RunError
from stppo_jax.types import UserError


@dataclasses.dataclass
class Run:
  """What `setup` makes of a config."""

  config: schema.Config
  mesh: jax.sharding.Mesh
  agent: evaluation.Agent
  learner: train_state.Learner
  functions: update.Functions
  state: train_state.TrainState
  frozen: train_state.Frozen

  @property
  def policy(self) -> dict:
    """The policy's parameters, adapters beside the kernels."""
    return self.frozen.policy(self.state.actor)


def train(config, workdir):
  """Runs, or resumes, the config in `workdir`; returns the metrics of the last evaluation."""
  schema.validate(config)
  checkpoint.claim(workdir, config)
  run = setup(config)
  questions = evaluation.load_tasks(config, config.data.train_split)
  stream = task_files.TaskStream(
      questions, config.train.episodes // config.rollout.group_size, config.seed)
  held_out = _held_out(config)
  checkpoints = checkpoint.Checkpoints(workdir, config.train.keep_checkpoints)
  first = checkpoints.latest() or 0
  if first:
    run.state = checkpoints.restore(first, run.state)
    logging.info('resumed after %d updates from %s', first, workdir)
  logging.info('%s: %s, %d devices as %s; %d questions to train on, %d held out', config.name,
               config.algorithm.variant, run.mesh.size, dict(run.mesh.shape), len(questions),
               len(held_out))
  started, scores = time.perf_counter(), {}
  with _writer(config, workdir, first) as writer, contextlib.closing(checkpoints):
    if not first:
      scores = _evaluate(run, held_out, 0, workdir, config)
      writer.write(0, scores)
    for n in range(first + 1, config.train.updates + 1):
      metrics, records = train_on(run, stream.take(n - 1), n)
      if config.log.episodes:
        _write_episodes(workdir, 'train', n, records)
      last = n == config.train.updates
      if last or (config.eval.every and n % config.eval.every == 0):
        scores = _evaluate(run, held_out, n, workdir, config)
        metrics |= scores
      writer.write(n, metrics)
      logging.info(metrics_lib.progress_line(
          n, config.train.updates, metrics, time.perf_counter() - started, first))
      _stop_if_stuck(run.state, config, n, workdir, records)
      every = config.train.checkpoint_every
      if last or (every and n % every == 0):
        checkpoints.save(n, run.state)
  logging.info('report: %s', report.build(workdir))
  return scores


def evaluate(config, workdir):
  """Greedy evaluation of `workdir`'s newest checkpoint, or of the model as it is without one."""
  schema.validate(config)
  run = setup(config)
  run.state, updates = _newest(workdir, run.state)
  if updates is not None:
    logging.info('evaluating %s after %d updates', workdir, updates)
  scores, _ = evaluation.evaluate(run.agent, run.policy, _held_out(config), seed=config.seed)
  return scores


def export(config, workdir):
  """Writes the policy of `workdir`'s newest checkpoint as a Hugging Face folder and returns its path.

  Adapters are merged into the weights, and a value head is left out.
  """
  schema.validate(config)
  if not os.path.isdir(os.path.join(workdir, 'checkpoints')):
    raise UserError(f'--workdir={workdir!r} has no checkpoint to export: give the folder of a run, with '
                    'the --config that it was trained by')
  checkpoint.claim(workdir, config)
  learner, state, frozen, _ = _models(config)
  state, updates = _newest(workdir, state)
  if updates is None:
    raise UserError(f'--workdir={workdir!r} has no whole checkpoint yet: let the run go on')
  params, folder = state.actor, os.path.join(workdir, 'export')
  if config.model.lora_rank:
    merge = jax.jit(lora.merge, static_argnums=2, donate_argnums=0)
    params = merge(frozen.actor, state.actor, learner.actor.lora_scale)
  convert.save_hf(
      folder, dataclasses.replace(learner.actor, head='tokens'), params,
      evaluation.model_folder(config))
  logging.info('the policy after %d updates is in %s', updates, folder)
  return folder


def setup(config) -> Run:
  """Loads models, questions' retriever and tokenizer; lays the state out; compiles nothing yet."""
  learner, state, frozen, mesh = _models(config)
  agent = evaluation.make_agent(config, learner.actor, sharding.rows(mesh))
  functions = update.compile_functions(learner, state, frozen, mesh)
  return Run(config, mesh, agent, learner, functions, state, frozen)


def _models(config):
  """(Learner, TrainState before the first update, Frozen, mesh)."""
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  sharding.check_rows(mesh, micro_batch=config.train.micro_batch)
  on_host = parts.on_host(config, mesh)
  variant = make_variant(config.algorithm)

  def load(head, folder=None, memory_kind=None):
    # Straight into their shards: the host never holds a model.
    shardings = functools.partial(sharding.tree_shardings, mesh=mesh, memory_kind=memory_kind)
    return evaluation.load_policy(config, head, folder, shardings)

  def make(function):
    shardings = sharding.tree_shardings(jax.eval_shape(function), mesh)
    return jax.jit(function, out_shardings=shardings)()

  model, critic_model, actor, critic, frozen = parts.load(config, variant, load, make)
  if parts.needs_reference(config):  # a copy: the state takes the actor's own buffers
    frozen = frozen.replace(reference=(
        jax.device_put(actor, sharding.tree_shardings(actor, mesh, sharding.HOST))
        if 'reference' in on_host else jax.tree.map(jnp.copy, actor)))
  learner = make_learner(config, variant, model, critic_model)
  state = train_state.create_sharded(
      learner, actor, critic, config.algorithm.kl_coef, mesh, on_host)
  return learner, state, frozen, mesh


def make_variant(algorithm) -> variants.Variant:
  """The row of the table that the config names, with the columns that it overrides."""
  row = variants.VARIANTS[algorithm.variant]
  columns = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(row)}
  return dataclasses.replace(row, **{k: v for k, v in columns.items() if v is not None})


def make_learner(config, variant, model, critic_model) -> train_state.Learner:
  """The static part of the compiled functions, from the config."""
  train, algorithm = config.train, config.algorithm
  steps_an_update = train.epochs * train.episodes // train.mini_batch
  if variant.ratio == 'none' and steps_an_update > 1:
    logging.warning(
        '%s has no importance ratio, and only the first of its %d optimizer steps an update is '
        'on-policy: set --config.train.mini_batch=%d --config.train.epochs=1', algorithm.variant,
        steps_an_update, train.episodes)

  def optimizer(options):
    return train_state.make_optimizer(
        options.lr, round(options.warmup * train.updates * steps_an_update), options.betas,
        options.eps, options.weight_decay, options.grad_clip)

  actor_optimizer, actor_lr = optimizer(config.actor)
  critic_optimizer, critic_lr = optimizer(config.critic)
  return train_state.Learner(
      actor=model, critic=critic_model, variant=variant, actor_optimizer=actor_optimizer,
      critic_optimizer=critic_optimizer, actor_lr=actor_lr, critic_lr=critic_lr,
      micro_batch=train.micro_batch, lengths=tuple(train.length_buckets),
      temperature=config.rollout.temperature,
      logp_chunk=config.model.logp_chunk or None, gamma=algorithm.gamma, lam=algorithm.lam,
      aggregation=algorithm.aggregation,
      norm_length=algorithm.norm_length or config.rollout.max_total,
      dual_clip=algorithm.dual_clip or None, entropy_coef=algorithm.entropy_coef,
      kl_in=algorithm.kl_in, kl_estimator=algorithm.kl_estimator,
      kl_target=algorithm.kl_target or None, kl_horizon=algorithm.kl_horizon,
      value_clip=algorithm.value_clip or None, value_coef=algorithm.value_coef,
      old_logp=algorithm.old_logp, log_bias=algorithm.log_bias,
      critic_warmup=train.critic_warmup * steps_an_update, num_turns=config.env.max_turns + 1)


def train_on(run, tasks, n):
  """Update number n (from 1) on the given questions: (metrics, records of the episodes).

  A function of the state, the questions, the seed and n alone, so a resumed run repeats it.
  """
  config, functions = run.config, run.functions
  group_size, train = config.rollout.group_size, config.train
  play_key, shuffle_key = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), n))
  tasks = [task for task in tasks for _ in range(group_size)]
  groups = [i // group_size for i in range(len(tasks))]
  timing = collections.defaultdict(float)
  run.agent.timing_s.clear()

  with _timed(timing, 'step'):
    with _timed(timing, 'gen'):
      keys = episode_loop.row_keys(play_key, tasks)
      episodes = run.agent.play(run.policy, tasks, keys, groups)
      # Sorted, so that rows of like length share a micro-batch and little of it is padding.
      episodes.sort(key=batching.trained_length)
    with _timed(timing, 'old_log_prob'):
      batch = batching.to_turn_batch(
          episodes, train.length_buckets[-1:], pad_id=run.agent.tokenizer.pad_id,
          sharding=sharding.rows(run.mesh))
      batch, gap = functions.annotate(run.state, run.frozen, batch)
      run.state, batch, summary = functions.with_advantages(run.state, batch)
      metrics = jax.device_get(gap | summary)
    with _timed(timing, 'update_actor'):
      lengths = np.array([batching.trained_length(episode) for episode in episodes])
      steps, seen, padded = [], {}, 0
      for rows in minibatches(shuffle_key, len(episodes), train.mini_batch, train.epochs):
        padded += padded_tokens(lengths[rows], train.micro_batch, train.length_buckets)
        run.state, step_metrics, step_seen = functions.update_step(
            run.state, run.frozen, batch, rows)
        steps.append(step_metrics)
        seen[tuple(rows)] = step_seen
      steps = jax.device_get(steps)
  metrics |= {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
  metrics['actor/skipped'] = max(step['actor/skipped'] for step in steps)
  timing |= {f'gen_{phase}': seconds for phase, seconds in run.agent.timing_s.items()}
  metrics |= {f'timing_s/{name}': seconds for name, seconds in timing.items()}
  metrics |= episode_metrics(episodes)
  num_tokens = int(lengths.sum())
  metrics |= {
      'perf/throughput': num_tokens / timing['step'],
      'perf/padding': 1 - train.epochs * num_tokens / padded,
      'perf/compilations': functions.num_compilations() + sum(
          run.agent.sampler.compiled_variants().values()),
  }
  if not config.log.episodes:
    return metrics, []
  return metrics, _records(run, episodes, batch, seen, n)


def minibatches(key, num_rows, mini_batch, epochs):
  """Row numbers [mini_batch], rising, of each optimizer step: every epoch deals all rows out anew."""
  for epoch_key in jax.random.split(key, epochs):
    order = np.asarray(jax.random.permutation(epoch_key, num_rows), np.int32)
    yield from np.sort(order.reshape(-1, mini_batch), axis=1)


def padded_tokens(lengths, micro_batch, buckets):
  """Tokens computed, padding included, for rising row lengths [b] in micro-batches."""
  longest = lengths.reshape(-1, micro_batch).max(axis=1)
  return micro_batch * int(np.asarray(buckets)[np.searchsorted(buckets, longest)].sum())


def episode_metrics(episodes):
  """What the episodes were like: scores, lengths, turns, failures."""
  of = lambda name: [episode.metrics.get(name, 0.0) for episode in episodes]
  agent_tokens = [sum(len(turn.tokens) for turn in episode.turns) for episode in episodes]
  return {
      **metrics_lib.summarize('critic/score', [episode.score for episode in episodes]),
      **metrics_lib.summarize('response_length', agent_tokens),
      **metrics_lib.summarize('prompt_length', [len(episode.prompt) for episode in episodes]),
      **metrics_lib.summarize('num_turns', [len(episode.turns) for episode in episodes]),
      'em/mean': float(np.mean(of('em'))),
      'f1/mean': float(np.mean(of('f1'))),
      'env/searches/mean': float(np.mean(of('searches'))),
      'env/invalid/mean': float(np.mean(of('invalid'))),
      'env/truncated': float(np.mean([episode.truncated for episode in episodes])),
      'env/retrieval_failed': float(np.mean([episode.failed for episode in episodes])),
  }


def _newest(workdir, state):
  """(the state of the newest checkpoint, its number of updates), or (`state`, None) without one."""
  if os.path.isdir(os.path.join(workdir, 'checkpoints')):
    with contextlib.closing(checkpoint.Checkpoints(workdir, 1)) as checkpoints:
      if (newest := checkpoints.latest()) is not None:
        return checkpoints.restore(newest, state), newest
  return state, None


def _held_out(config):
  """The questions to evaluate on: a fixed sample of the split, or all of it."""
  tasks = evaluation.load_tasks(config, config.data.eval_split)
  wanted = config.eval.episodes or len(tasks)
  order = np.random.default_rng(0).permutation(len(tasks))[:wanted]
  return [tasks[i] for i in sorted(order)]


def _evaluate(run, tasks, n, workdir, config):
  """Greedy scores after n updates, logged; the episodes go to disk."""
  started = time.perf_counter()
  scores, episodes = evaluation.evaluate(run.agent, run.policy, tasks, seed=config.seed)
  hops = '  '.join(f'{name[-5:]} {scores[name]:.3f}' for name in scores if 'em_hops' in name)
  logging.info('held out after %d updates: EM %.3f  (%s)', n, scores['val-core/all/em'], hops)
  if config.log.episodes:
    _write_episodes(
        workdir, 'eval', n, batching.to_records(episodes, run.agent.tokenizer, n, 'eval'))
  return scores | {'timing_s/testing': time.perf_counter() - started}


def _records(run, episodes, batch, seen, n):
  """The episodes with what training saw of each token; ratios are those of the last epoch."""
  arrays = jax.device_get({'old_logp': batch.old_logp, 'advantages': batch.advantages})
  if run.learner.has_values:
    arrays['values'] = np.asarray(batch.old_values)
  arrays |= {'ratio': np.ones_like(arrays['old_logp']),
             'clipped': np.zeros_like(arrays['old_logp'])}
  for rows, step_seen in jax.device_get(seen).items():
    for name, x in step_seen.items():
      arrays[name][list(rows)] = x
  return batching.to_records(episodes, run.agent.tokenizer, n, 'train', arrays)


def _write_episodes(workdir, kind, n, records):
  folder = os.path.join(workdir, 'episodes')
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, f'{kind}_{n:06d}.jsonl'), 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(record) + '\n' for record in records)


def _stop_if_stuck(state, config, n, workdir, records):
  """Ends the run when the last optimizer steps were all skipped for non-finite gradients."""
  skipped = int(state.skipped)
  if skipped >= config.train.max_nonfinite:
    _write_episodes(workdir, 'nonfinite', n, records)
    raise RunError(
        f'gradients were not finite in the last {skipped} optimizer steps, up to update {n}: their '
        f'episodes are in {workdir}/episodes/nonfinite_{n:06d}.jsonl; lower the learning rate, or '
        'resume from the last checkpoint with the same command')


def _writer(config, workdir, first):
  return metrics_lib.MetricsWriter(
      workdir, tensorboard=config.log.tensorboard, wandb_project=config.log.wandb_project or None,
      run_name=config.name, config_json=json.dumps(dataclasses.asdict(config)),
      resume_step=first if first else -1)


@contextlib.contextmanager
def _timed(timing, name):
  started = time.perf_counter()
  yield
  timing[name] += time.perf_counter() - started
