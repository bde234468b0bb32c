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
import numpy as np

from stppo_jax import config as schema
from stppo_jax import evaluation
from stppo_jax import tasks as task_files
from stppo_jax import validation
from stppo_jax.models import convert
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as records_lib
from stppo_jax.monitoring import health
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import report
from stppo_jax.monitoring import timing as timing_lib
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import pipeline as pipelines
from stppo_jax.rollout import seams
from stppo_jax.runtime import hosts
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import packing
from stppo_jax.training import state as train_state
from stppo_jax.training import update
from stppo_jax.types import RunError
from stppo_jax.types import Stopped
from stppo_jax.types import UserError

MAX_ROLLBACKS = 3  # to one checkpoint
_SHARED = '--workdir must be a folder that all processes share'


@dataclasses.dataclass
class Run:
  """What `setup` makes of a config."""

  config: schema.Config
  mesh: jax.sharding.Mesh
  agent: agent_lib.Agent
  learner: train_state.Learner
  functions: update.Functions
  state: train_state.TrainState
  frozen: train_state.Frozen

  @property
  def policy(self) -> dict:
    """The policy's parameters, adapters beside the kernels."""
    return self.frozen.policy(self.state.actor)


def train(config, workdir, stop_requested=lambda: False, profile=0):
  """Runs, or resumes, the config in `workdir`; returns the metrics of the last evaluation.

  When `stop_requested()` turns true, the update under way is finished and saved, and the rest left to
  the next call; if its episodes are still under way, they are left too. A run whose gradients stay
  non-finite ends, or goes on from its newest checkpoint. A trace of `profile` updates goes to
  workdir/profile.
  """
  validation.validate(config)
  if config.pipeline.staleness and jax.process_count() > 1:
    raise UserError(
        f'config.pipeline.staleness={config.pipeline.staleness} samples in a thread, and several '
        'processes would not start their programs in one order: set --config.pipeline.staleness=0'
    )
  hosts.require_same('config', dataclasses.asdict(config))
  with workdirs.lock(workdir) if hosts.is_writer() else contextlib.nullcontext():
    hosts.by_writer(workdirs.claim, workdir, dataclasses.asdict(config), validation.may_change())
    run = setup(config)
    last_batch, rollbacks = None, collections.Counter()
    while True:
      try:
        return _train(run, workdir, stop_requested, profile, last_batch)
      except _Stuck as stuck:
        with checkpoint.Checkpoints(workdir) as checkpoints:
          newest = checkpoints.newest()
        rollbacks[newest] += 1
        if not newest:
          raise RunError(f'{stuck}; there is no checkpoint yet: lower the learning rate') from stuck
        if config.train.on_nonfinite == 'stop':
          raise RunError(
              f'{stuck}; lower the learning rate, or go back to the newest checkpoint and '
              'on with other questions: --config.train.on_nonfinite=rollback'
          ) from stuck
        if rollbacks[newest] > MAX_ROLLBACKS:
          raise RunError(
              f'{stuck}, and so after {MAX_ROLLBACKS} rollbacks to update {newest}: lower '
              'the learning rate, in another --workdir'
          ) from stuck
        logging.warning('%s; going back to update %d, on with other questions', stuck, newest)
        last_batch = stuck.batch_number


def evaluate(config, workdir):
  """Greedy evaluation of `workdir`'s newest checkpoint, or of the model as it is without one."""
  validation.validate(config)
  hosts.require_same('config', dataclasses.asdict(config))
  run, held_out = setup(config), _held_out(config)
  hosts.require_same('questions', [task.id for task in held_out])
  run.state, updates = _newest(workdir, run.state)
  if updates is not None:
    logging.info('evaluating %s after %d updates', workdir, updates)
  scores, _ = evaluation.evaluate(run.agent, run.policy, held_out, seed=config.seed)
  return scores


def export(config, workdir):
  """Writes the policy of `workdir`'s newest checkpoint as a Hugging Face folder and returns its path.

  Adapters are merged into the weights, and a value head is left out.
  """
  validation.validate(config)
  if not os.path.isdir(os.path.join(workdir, 'checkpoints')):
    raise UserError(
        f'--workdir={workdir!r} has no checkpoint to export: give the folder of a run, with '
        'the --config that it was trained by'
    )
  workdirs.claim(workdir, dataclasses.asdict(config), validation.may_change())
  learner, state, frozen, _ = learner_lib.build(config)
  state, updates = _newest(workdir, state)
  if updates is None:
    raise UserError(f'--workdir={workdir!r} has no whole checkpoint yet: let the run go on')
  params, folder = state.actor, os.path.join(workdir, 'export')
  if config.model.lora_rank:
    merge = jax.jit(lora.merge, static_argnums=2, donate_argnums=0)
    params = merge(frozen.actor, state.actor, learner.actor.lora_scale)
  convert.save_hf(
      folder,
      dataclasses.replace(learner.actor, head='tokens'),
      params,
      agent_lib.model_folder(config),
  )
  logging.info('the policy after %d updates is in %s', updates, folder)
  return folder


def setup(config) -> Run:
  """Loads models, questions' retriever and tokenizer; lays the state out; compiles nothing yet."""
  seams.resolve(config)  # a wrong name is told before weights are loaded
  learner, state, frozen, mesh = learner_lib.build(config)
  agent = agent_lib.make_agent(config, learner.actor, sharding.rows(mesh))
  functions = update.compile_functions(learner, state, frozen, mesh)
  return Run(config, mesh, agent, learner, functions, state, frozen)


def train_on(run, pipeline, number, n):
  """Update n, on batch `number`: (metrics, records of the episodes).

  A function of the state, what the pipeline holds, the seed and `number`: a resumed run repeats it.
  """
  config, functions, train = run.config, run.functions, run.config.train
  _, shuffle_key = pipelines.batch_keys(config.seed, number)
  timing = timing_lib.Timing()

  with timing('step'):
    with timing('wait'):
      sampled = pipeline.take(run.state.actor, number)
    # In the order of length, whatever the order of arrival: rows of like length may share a bin.
    episodes = sorted(sampled.episodes, key=batching.trained_length)
    lengths = np.array([batching.trained_length(episode) for episode in episodes])
    deals = list(minibatches(shuffle_key, len(episodes), train.mini_batch, train.epochs))
    packings = [
        packing.pack(lengths[rows], train.micro_batch, train.length_buckets) for rows in deals
    ]
    with timing('old_log_prob'):
      batch = batching.to_turn_batch(
          episodes,
          train.length_buckets[-1:],
          pad_id=run.agent.tokenizer.pad_id,
          sharding=sharding.rows(run.mesh),
      )
      first_epoch = slice(len(episodes) // train.mini_batch)
      batch, gap = functions.annotate(
          run.state,
          run.frozen,
          batch,
          np.stack(deals[first_epoch]),
          packing.stack(packings[first_epoch]),
      )
      run.state, batch, summary = functions.with_advantages(run.state, batch)
      metrics = jax.device_get(gap | summary)
    with timing('update_actor'):
      steps, seen = [], {}
      for rows, packed in zip(deals, packings):
        run.state, step_metrics, step_seen = functions.update_step(
            run.state, run.frozen, batch, rows, packed
        )
        steps.append(step_metrics)
        seen[tuple(rows)] = step_seen
      steps = jax.device_get(steps)
    with timing('records'):
      metrics |= {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
      metrics['actor/skipped'] = max(int(step['actor/skipped']) for step in steps)  # in a row
      metrics |= records_lib.summarize(episodes)
      wanted = config.log.episodes or metrics['actor/skipped'] >= train.max_nonfinite
      records = (
          records_lib.with_tokens(
              episodes, run.agent.tokenizer, batch, seen, n, run.learner.has_values
          )
          if wanted
          else []
      )
  metrics |= sampled.measured | timing.metrics()
  num_tokens = int(lengths.sum())
  num_computed = sum(
      packing.num_computed(packed, train.micro_batch, train.length_buckets) for packed in packings
  )
  metrics |= {
      'pipeline/staleness': sampled.staleness,
      'perf/throughput': num_tokens / timing['step'],
      'perf/padding': 1 - train.epochs * num_tokens / max(num_computed, 1),
      'perf/host_memory_gb': metrics_lib.host_memory_gb(),
      'perf/compilations': functions.num_compilations()
      + sum(run.agent.sampler.compiled_variants().values()),
  }
  return metrics, records


def minibatches(key, num_rows, mini_batch, epochs):
  """Row numbers [mini_batch], rising, of each optimizer step: every epoch deals all rows out anew."""
  for epoch_key in jax.random.split(key, epochs):
    order = np.asarray(jax.random.permutation(epoch_key, num_rows), np.int32)
    yield from np.sort(order.reshape(-1, mini_batch), axis=1)


class _Stuck(Exception):
  """The last optimizer steps were all skipped for non-finite gradients."""

  def __init__(self, message, batch_number):
    super().__init__(message)
    self.batch_number = batch_number


def _train(run, workdir, stop_requested, profile=0, last_batch=None):
  """Trains from the newest checkpoint on; after a rollback with the batches after `last_batch`."""
  config = run.config
  questions = agent_lib.load_tasks(config, config.data.train_split)
  batches = pipelines.Batches(
      run.agent,
      run.frozen.policy,
      task_files.TaskStream(
          questions, config.train.episodes // config.rollout.group_size, config.seed
      ),
      config.rollout.group_size,
      config.seed,
      config.retriever.max_failed_share,
      config.retriever.max_outage_s,
      functools.partial(pipelines.pause, stop_requested=stop_requested),
      # Batches ahead are finished: nobody would have the parameters to sample them again.
      give_up=None if config.pipeline.staleness else stop_requested,
  )
  held_out = _held_out(config)
  hosts.require_same('questions', [task.id for task in questions + held_out])
  with contextlib.ExitStack() as resources:
    checkpoints = resources.enter_context(
        checkpoint.Checkpoints(workdir, config.train.keep_checkpoints, config.train.on_save_error)
    )
    first, passed_over, ready = _resume(run, checkpoints, batches, last_batch)
    writer = resources.enter_context(_writer(config, workdir, first))
    pipeline = resources.enter_context(
        pipelines.Pipeline(batches.sample, config.pipeline.staleness, ready)
    )
    before_update = resources.enter_context(
        timing_lib.of_updates(os.path.join(workdir, 'profile'), profile, first)
    )
    logging.info(
        '%s: %s, %d devices as %s; %d questions to train on, %d held out',
        config.name,
        config.algorithm.variant,
        run.mesh.size,
        dict(run.mesh.shape),
        len(questions),
        len(held_out),
    )
    started, scores, n = time.perf_counter(), {}, first
    if not first:
      scores = _evaluate(run, held_out, 0, workdir, config)
      _write(writer, 0, scores)
    history = [health.watched(row) for row in hosts.by_writer(metrics_lib.read_metrics, workdir)]
    while n < config.train.updates and not any(hosts.share(stop_requested())):
      before_update(n)
      try:
        with _saved_if_it_stops(checkpoints, n, run.state, passed_over):
          metrics, records = train_on(run, pipeline, n + 1 + passed_over, n + 1)
      except Stopped:
        break
      n += 1
      if config.log.episodes:
        records_lib.write(workdir, 'train', n, records)
      if n == config.train.updates or (config.eval.every and n % config.eval.every == 0):
        with pipeline.idle():
          scores = _evaluate(run, held_out, n, workdir, config)
        metrics |= scores
      history.append(health.watched(metrics))
      alarms = health.check(history, dataclasses.asdict(config.health), config.health.window)
      _write(writer, n, metrics | health.flags(alarms))
      logging.info(
          metrics_lib.progress_line(
              n,
              config.train.updates,
              metrics,
              time.perf_counter() - started,
              first,
              run.agent.env.core_metrics,
          )
      )
      _check_progress(metrics['actor/skipped'], config, n, n + passed_over, workdir, records)
      with _saved_if_it_stops(checkpoints, n, run.state, passed_over):
        _warn(alarms, config.health, n, records)
      checkpoints.check()
      if config.train.checkpoint_every and n % config.train.checkpoint_every == 0:
        checkpoints.save(n, run.state, _progress(passed_over, pipeline))
    if n > first:
      checkpoints.save(n, run.state, _progress(passed_over, pipeline))
  if n < config.train.updates:
    logging.info(
        'stopped as asked, %d of %d updates done and saved; the same command goes on',
        n,
        config.train.updates,
    )
  else:
    logging.info('report: %s', hosts.by_writer(report.build, workdir))
  return scores


def _progress(passed_over, pipeline):
  """What a checkpoint holds besides the state.

  Choice: batches sampled ahead are waited for, at the end of a run, too: who raises `updates` later
  gets the run that he would have had.
  """
  return {
      'passed_over': passed_over,
      'sampled': [pipelines.to_json(batch) for batch in pipeline.contents()],
  }


def _resume(run, checkpoints, batches, last_batch):
  """(updates done, batches passed over in rollbacks so far, batches sampled ahead).

  After a rollback, batches go on after `last_batch`: the same ones again would fail again. What was
  sampled ahead is dropped, since among it may be what failed.
  """
  first = checkpoints.newest()
  hosts.require_same('checkpoint', first, _SHARED)
  if first is None:
    return 0, 0, []
  checkpoints.drop_after(first)
  shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run.state
  )
  run.state = None  # makes room
  run.state = checkpoints.restore(first, shapes)
  if last_batch is not None:
    run.state = run.state.replace(skipped=run.state.skipped * 0)
    return first, last_batch - first, []
  progress = checkpoints.progress(first)
  logging.info('resumed after %d updates', first)
  ready = [
      pipelines.from_json(record, batches.tasks(record['number'])) for record in progress['sampled']
  ]
  return first, progress['passed_over'], ready


def _newest(workdir, state):
  """(the state of the newest checkpoint, its number of updates), or (`state`, None) without one."""
  if not hosts.by_writer(os.path.isdir, os.path.join(workdir, 'checkpoints')):
    return state, None
  with checkpoint.Checkpoints(workdir) as checkpoints:
    newest = checkpoints.newest()
    hosts.require_same('checkpoint', newest, _SHARED)
    return (state if newest is None else checkpoints.restore(newest, state)), newest


def _held_out(config):
  """The questions to evaluate on: a fixed sample of the split, or all of it."""
  tasks = agent_lib.load_tasks(config, config.data.eval_split)
  wanted = config.eval.episodes or len(tasks)
  order = np.random.default_rng(0).permutation(len(tasks))[:wanted]
  return [tasks[i] for i in sorted(order)]


def _evaluate(run, tasks, n, workdir, config):
  """Greedy scores after n updates, logged; the episodes go to disk."""
  started = time.perf_counter()
  scores, episodes = evaluation.evaluate(run.agent, run.policy, tasks, seed=config.seed)
  logging.info('held out after %d updates: %s', n, evaluation.line(scores))
  if failed := pipelines.failed_share(episodes):
    logging.warning(
        'retrieval failed in %.0f%% of the held-out episodes: they count as wrong', 100 * failed
    )
  if config.log.episodes:
    records_lib.write(
        workdir, 'eval', n, batching.to_records(episodes, run.agent.tokenizer, n, 'eval')
    )
  return scores | {'timing_s/testing': time.perf_counter() - started}


def _check_progress(skipped, config, n, number, workdir, records):
  """Raises _Stuck, and leaves the episodes behind, when too many steps in a row were skipped."""
  if skipped >= config.train.max_nonfinite:
    records_lib.write(workdir, 'nonfinite', n, records)
    raise _Stuck(
        f'gradients or losses were not finite in {skipped} optimizer steps in a row, up to update {n}: '
        f'their episodes are in {workdir}/episodes/nonfinite_{n:06d}.jsonl',
        number,
    )


def _warn(alarms, settings, n, records):
  """Logs what has become unhealthy, and ends the run where `stop_on` says so."""
  for alarm in alarms:
    if not alarm.is_new:
      continue
    lines = ', '.join(map(str, health.worst_lines(alarm.name, records)))
    place = f'line {lines} of episodes/train_{n:06d}.jsonl' if lines else "the run's charts"
    message = alarm.line(settings.window, place)
    if alarm.name in settings.stop_on:
      raise RunError(f'update {n}: {message}; config.health.stop_on says to stop')
    logging.warning(message)


@contextlib.contextmanager
def _saved_if_it_stops(checkpoints, updates, state, passed_over):
  """A RunError inside leaves a checkpoint of the state after `updates`.

  Choice: without what was sampled ahead, some of which may be what failed: it is sampled anew.
  """
  try:
    yield
  except RunError:
    if updates:
      checkpoints.save(updates, state, {'passed_over': passed_over, 'sampled': []})
    raise


def _writer(config, workdir, first):
  """The run's MetricsWriter; None (in a context) where another process writes."""
  if not hosts.is_writer():
    return contextlib.nullcontext()
  return metrics_lib.MetricsWriter(
      workdir,
      tensorboard=config.log.tensorboard,
      wandb_project=config.log.wandb_project or None,
      run_name=config.name,
      config_json=json.dumps(dataclasses.asdict(config)),
      resume_step=first if first else -1,
  )


def _write(writer, n, metrics):
  if writer is not None:
    writer.write(n, metrics)
