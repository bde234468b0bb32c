"""The training loop, readable as a story.

questions -> episodes (host) -> one TurnBatch (devices) -> old log-probs and values -> advantages
-> a few optimizer steps -> metrics; now and then an evaluation and a checkpoint

An *update* is one rollout with its optimizer steps; a *step* is one optimizer step.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import math
import threading
import time

from absl import logging
import jax

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import tasks as task_files
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.distributed import determinism
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import scores as evaluation
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import journal as journals
from stppo_jax.monitoring import roles as roles_lib
from stppo_jax.monitoring import timing as timing_lib
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import pipeline as pipelines
from stppo_jax.rollout import prepare
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import packing
from stppo_jax.training import recovery
from stppo_jax.training import state as train_state
from stppo_jax.trajectories import saved


@dataclasses.dataclass
class Run:
  """What `setup` makes of a config; `state` changes from step to step."""

  config: schema.Config
  agent: agent_lib.Agent
  learner: learner_lib.Learner
  state: train_state.State
  bins: packing.Bins
  components: components.Components
  held_out: list[types.Task]

  own_roles: tuple[str, ...] = ()  # those that have a state of their own

  @property
  def policy(self) -> dict:
    """The policy's parameters: the trained ones combined with the frozen ones."""
    return self.learner.policy(self.state.actor)


def train(
    config: schema.Config,
    workdir: str,
    stop_requested: Callable[[], bool] = lambda: False,
    profile: int = 0,
) -> dict[str, float]:
  """Runs, or resumes, the config in `workdir`; returns the metrics of the last evaluation.

  When `stop_requested()` turns true, the update in progress is finished and saved, and the rest is
  left to the next call; episodes in progress are abandoned. A run whose gradients stay non-finite
  ends, or rolls back to its newest checkpoint. A trace of `profile` updates goes to
  workdir/profile.
  """
  validation.validate(config)
  if config.train.deterministic:
    determinism.enable()
  variant = learner_lib.make_variant(config)  # names are resolved before anything is written
  env = components.resolve(config).env
  _check_staleness(config)
  if config.rollout.replay:
    hosts.by_writer(saved.check_has, config.rollout.replay, config.train.updates)
    if config.train.updates:
      _make_replay(config, variant, env)(1)  # or an error now
  hosts.require_same('config', dataclasses.asdict(config))
  with recovery.claimed(config, variant, workdir):
    run = setup(config)
    train_after = functools.partial(_train, run, workdir, stop_requested, profile)
    return recovery.with_rollbacks(train_after, workdir, config.train.on_nonfinite)


def _check_staleness(config):
  """Refuses to sample in a thread where programs of two threads may block each other.

  Choice: on a CPU several devices are allowed: XLA matches a collective's devices by its program
  run, in any order. It has to have threads for that. By default there are as many as simulated
  devices, each device that waits in a collective keeps one, and a few programs in flight leave
  none. So the command and the tests set NPROC=64, and a program that calls `train` on simulated
  devices must do so too. On an accelerator each device has one queue. Two threads may fill two
  queues in different orders, and then each device waits for another one forever.
  """
  staleness = config.pipeline.staleness
  if not staleness or config.rollout.replay:
    return
  to_zero = 'set --config.pipeline.staleness=0'
  if jax.process_count() > 1:
    raise types.UserError(
        f'config.pipeline.staleness={staleness} samples in a thread, and several '
        f'processes would not start their programs in one order: {to_zero}'
    )
  mesh = sharding.mesh_of(config.mesh)
  platform = mesh.devices.flat[0].platform
  if mesh.size > 1 and platform != 'cpu':
    raise types.UserError(
        f'config.pipeline.staleness={staleness} samples in a thread, and on {mesh.size} devices '
        f'({platform}) its collectives and those of training may wait for each other forever: '
        f'{to_zero}, or let the process see one device'
    )


def setup(config: schema.Config) -> Run:
  """Loads questions, tokenizer, retriever and models; lays the state out; compiles nothing.

  What a user may have got wrong comes before the weights.
  """
  named = components.resolve(config)
  questions = named.held_out_tasks()
  to_train_on = named.load_tasks(config.data.train_split)
  prepared = prepare.prepare(config)
  for tasks in (to_train_on, questions):
    prepare.check_prompts(config, prepared, tasks)
  task_files.warn_of_overlap(to_train_on, questions)
  learner, state = learner_lib.build(config, prepared.env.roles)
  agent = components.make_agent(config, learner.spec.actor, learner.mesh, prepared)
  bins = learner_lib.make_bins(config, learner, agent.tokenizer.pad_id)
  own = prepared.env.roles if config.model.role_parameters == 'own' else ()
  return Run(config, agent, learner, state, bins, named, questions, own)


def train_on(
    run: Run, pipeline: pipelines.Pipeline, number: int, n: int
) -> tuple[dict[str, float], episodes_lib.Records]:
  """Runs update n on batch `number`; returns its metrics and the records of its episodes.

  A function of the state, the batch, the seed and `number`: a resumed run repeats it.
  """
  timing = timing_lib.Timing()
  with timing('step'):
    with timing('wait'):
      sampled = pipeline.take(run.state.actor, number)  # host: questions -> episodes
    learned = _learn_all(run, sampled, timing)
    with timing('records'):
      metrics = _summarize(run, learned)
      records = _records(run, sampled, learned, n, metrics['actor/skipped'])
  num_tokens = sum(packing.num_tokens(packing.first_epoch(part.steps)) for part in learned)
  metrics |= sampled.measured | timing.metrics()
  metrics |= {
      'pipeline/staleness': sampled.staleness,
      'perf/throughput': num_tokens / timing['step'] / run.learner.mesh.size,  # as verl, per device
      'perf/padding': run.bins.padding([step for part in learned for step in part.steps]),
      'perf/compilations': run.learner.num_compilations()
      + sum(run.agent.sampler.compiled_variants().values()),
  }
  return metrics, records


@dataclasses.dataclass
class _Learned:
  """An update of one policy: its episodes, and what was measured."""

  episodes: list[types.Episode]
  batch: types.TurnBatch
  steps: list[packing.Step]
  metrics: dict[str, float]  # of the batch
  seen: list[episodes_lib.StepMetrics]  # of each optimizer step


def _learn_all(run, sampled, timing) -> list[_Learned]:
  """Updates the policy that all roles share, or each role's own on its rows."""
  _, key = pipelines.batch_keys(run.config.seed, sampled.number)
  if not run.own_roles:
    run.state, learned = _learn(run, run.state, sampled.episodes, key, timing)
    return [learned]
  parts, members = [], list(run.state.members)
  for i, role in enumerate(run.own_roles):
    rows = [episode for episode in sampled.episodes if episode.role == role]
    members[i], learned = _learn(run, members[i], rows, key, timing)
    parts.append(learned)
  run.state = train_state.TeamState(members)
  return parts


def _learn(run, state, episodes, key, timing) -> tuple[train_state.TrainState, _Learned]:
  """Updates one policy on a batch of episodes."""
  learner = run.learner
  with timing('old_log_prob'):
    episodes = packing.by_length(episodes, run.bins.num_roles)
    batch, steps = packing.to_device(episodes, run.bins, key)  # the one crossing
    batch, gap = learner.annotate(state, batch, steps)  # old_logp, ref_logp, old_values
    state, batch, credit = learner.with_advantages(state, batch)  # advantages, returns
    metrics = jax.device_get(gap | credit)
  with timing('update_actor'):
    seen = []
    for step in steps:
      state, measured, tokens = learner.update_step(state, batch, step)
      seen.append(episodes_lib.StepMetrics(step.rows, measured, tokens))
    seen = [dataclasses.replace(x, metrics=jax.device_get(x.metrics)) for x in seen]
  return state, _Learned(episodes, batch, steps, metrics, seen)


def _summarize(run, learned):
  """Returns the metrics of an update; of several policies the means, and those of each role.

  A policy whose role never moved has none.
  """
  moved = [any(map(batching.trained_length, part.episodes)) for part in learned]
  counted = [part for part, one in zip(learned, moved) if one] or learned
  metrics = journals.means([part.metrics for part in counted])
  for role, part, one in zip(run.own_roles, learned, moved):
    if one:
      steps = journals.means([step.metrics for step in part.seen])
      metrics |= roles_lib.update_metrics(role, journals.means([part.metrics]) | steps)
  episodes = [episode for part in learned for episode in part.episodes]
  return metrics | journals.summarize(episodes, [seen for part in counted for seen in part.seen])


def _records(run, sampled, learned, n, skipped):
  """Returns the records of the episodes, token by token, if they are to be written."""
  log = run.config.log
  wanted = log.episodes and n % log.episodes_every == 0
  if not wanted and skipped < run.config.train.max_nonfinite:
    return episodes_lib.Records()
  has_values, tokenizer = run.learner.spec.has_values, run.agent.tokenizer
  parts = []
  for part in learned:
    rows = dataclasses.replace(sampled, episodes=part.episodes)
    parts.append(episodes_lib.update_records(rows, tokenizer, part.batch, part.seen, n, has_values))
  return episodes_lib.joined(parts)


def _train(run, workdir, stop_requested, profile=0, last_batch=None):
  """Trains from the newest checkpoint, after a rollback with the batches after `last_batch`."""
  config, updates = run.config, run.config.train.updates
  questions = run.components.load_tasks(config.data.train_split)
  recovery.claim_questions(config, questions, run.held_out, workdir)
  logging.info(
      '%s: %s, %d x %s as %s; %d questions to train on, %d held out',
      config.name,
      config.algorithm.variant,
      run.learner.mesh.size,
      hosts.device_kind(),
      dict(run.learner.mesh.shape),
      len(questions),
      len(run.held_out),
  )
  over = threading.Event()  # ends a batch that is sampled ahead and that this run will not need
  give_up = lambda: over.is_set() or stop_requested()
  batches = make_batches(config, run.agent, run.learner.policy, questions, give_up)
  evaluate = functools.partial(_evaluate, run, batches, stop_requested)
  scores, score = {}, None  # score: the main one after n updates, if these were evaluated
  with contextlib.ExitStack() as resources:
    enter = resources.enter_context
    saves = enter(recovery.Saves(workdir, config.train, _num_bytes(run.state)))
    saves.resume(run, batches, last_batch)
    position = saves.position
    first = n = position.updates
    core_metrics, unfinished = run.agent.env.core_metrics, position.unfinished
    as_dict = dataclasses.asdict(config)
    journal = enter(journals.Journal(workdir, as_dict, first, core_metrics, unfinished is not None))
    pipeline = enter(_make_pipeline(run, batches, position.ahead))
    position.ahead = ()  # the pipeline frees the copies in it, once they have sampled
    resources.callback(over.set)
    before_update = enter(timing_lib.of_updates(f'{workdir}/profile', profile, first, updates))
    with contextlib.suppress(types.Stopped):
      if not first:
        scores = evaluate(journal, 0)
        journal.write(0, scores)
      elif unfinished is not None:  # the run was stopped during this evaluation
        scores = evaluate(journal, n)
        saves.evaluated(n, journal.main_score(scores))
        journal.warn(n, journal.updated(n, unfinished | scores), episodes_lib.Records())
        unfinished = None
      while n < updates and not any(hosts.share(stop_requested())):
        before_update(n)
        with saves.kept_on_error(n, run.state):
          metrics, records = train_on(run, pipeline, n + 1 + position.passed_over, n + 1)
        n += 1
        metrics['perf/failed_saves'] = saves.num_failed
        journal.record('train', n, records)
        score = None
        if n == updates or (config.eval.every and n % config.eval.every == 0):
          unfinished = metrics
          with pipeline.idle(), saves.kept_on_error(n, run.state, unfinished):
            scores = evaluate(journal, n)
          metrics, unfinished, score = metrics | scores, None, journal.main_score(scores)
        alarms = journal.updated(n, metrics)
        _check_finite(run, journal, n, n + position.passed_over, metrics, records)
        with saves.kept_on_error(n, run.state, score=score):
          journal.warn(n, alarms, records)
        saves.after(n, run.state, pipeline, score)
    if n > first:
      saves.last(n, run.state, pipeline, unfinished, score)
  journal.finished(n)
  return scores


def _num_bytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def make_batches(
    config: schema.Config,
    agent: agent_lib.Agent,
    policy: Callable[[dict], dict],
    questions: list[types.Task],
    stop_requested: Callable[[], bool],
) -> pipelines.Batches:
  """Makes the batches of a run: its questions, and how they are played."""
  group_size = config.rollout.group_size
  if hasattr(agent.retriever, 'give_up'):
    agent.retriever.give_up = stop_requested
  return pipelines.Batches(
      agent,
      policy,
      task_files.TaskStream(questions, config.train.episodes // group_size, config.seed),
      group_size,
      config.seed,
      config.retriever.max_failed_share,
      config.retriever.max_outage_s,
      functools.partial(pipelines.pause, stop_requested=stop_requested),
      give_up=stop_requested,
      max_num_gen_batches=config.rollout.max_num_gen_batches,
      max_failed=config.rollout.max_failed,
      num_roles=agent.env.num_roles,
  )


def _make_pipeline(run, batches, ahead):
  """Makes the pipeline that samples the batches, or that reads those of config.rollout.replay."""
  config = run.config
  if not config.rollout.replay:
    return pipelines.Pipeline(batches.sample, config.pipeline.staleness, ahead, batches.copy)
  logging.info('nothing is sampled to train on: batches are those of %s', config.rollout.replay)
  replay = _make_replay(config, run.learner.spec.variant, run.agent.env)

  def read(unused_params, number, unused_staleness):
    try:
      return replay(number)
    except types.UserError as error:  # the updates before are kept
      raise types.RunError(str(error)) from error

  return pipelines.Pipeline(read, 0)


def _make_replay(config, variant, env):
  """Makes the reader of the batches of config.rollout.replay."""
  return saved.Replay(
      config.rollout.replay,
      prepare.load_tokenizer(config),
      config.train.mini_batch,
      config.train.length_buckets[-1],
      variant.needs_groups,
      env.roles,
      config.rollout.routing_replay == 'sampling',
  )


def _evaluate(run, batches, stop_requested, journal, n):
  """Returns the greedy scores after n updates; logs them and writes the episodes.

  Raises Stopped when it is asked to, and waits for a retriever that fails, as sampling does.
  """
  started = time.perf_counter()
  scores, episodes = evaluation.evaluate(
      run.agent,
      run.policy,
      run.held_out,
      seed=run.config.seed,
      give_up=stop_requested,
      until_answered=lambda play: batches.until_answered(play)[0],
  )
  pipelines.check_environment(episodes, run.config.rollout.max_failed)
  journal.evaluated(n, scores, episodes, run.agent.tokenizer)
  return scores | {'timing_s/testing': time.perf_counter() - started}


def _check_finite(run, journal, n, number, metrics, records):
  """Raises Stuck when parameters are not finite, or when too many steps in a row were skipped.

  Of the latter it writes the episodes.
  """
  skipped = metrics['actor/skipped']
  for name in ('stppo/step_norm', 'critic/step_norm'):
    if not math.isfinite(metrics.get(name, 0.0)):
      raise recovery.Stuck(f'update {n} left parameters that are not finite ({name})', number)
  if skipped >= run.config.train.max_nonfinite:
    path, cause = journal.dump(n, records), 'gradients or losses were not finite'
    divisor, norm = metrics.get('stppo/divisor', 1.0), metrics.get('stppo/grad_norm', math.nan)
    if math.isfinite(norm) and not math.isfinite(divisor):
      name = run.learner.spec.variant.described()['divisor']
      cause = f'the divisor {name!r} gave no positive number, so nothing was applied'
    raise recovery.Stuck(
        f'{cause} in {skipped} optimizer steps in a row, up to update {n}: their episodes are in '
        f'{path}',
        number,
    )
