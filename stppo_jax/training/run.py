"""A run: its components, assembled from the config, and what happens around each update.

`check` and `load_inputs` find a user's mistakes before weights are loaded. A `Run` samples,
measures, evaluates, logs and saves for `loop.train`.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import math
import time

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.algorithms.variants import Variant
from stppo_jax.assembly import agents
from stppo_jax.assembly import components as components_lib
from stppo_jax.assembly.components import Components
from stppo_jax.config import Config
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.distributed import hosts
from stppo_jax.distributed import malloc
from stppo_jax.models import sharding
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import journal as journal_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import scores as scores_lib
from stppo_jax.monitoring import timing as timing_lib
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import batches as batches_lib
from stppo_jax.rollout import batching
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import pipeline as pipeline_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import sequences
from stppo_jax.settings import objective
from stppo_jax.settings import validation
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.training import checkpoint
from stppo_jax.training import learner as learner_lib
from stppo_jax.training import packing
from stppo_jax.training import recovery
from stppo_jax.training import summary


def check(config: Config) -> tuple[Variant, Components]:
  """Checks the settings and names of a config; returns its objective and its components."""
  validation.validate(config)
  if config.train.deterministic:
    from stppo_jax.distributed import determinism

    determinism.enable()
  variant = objective.make_variant(config)
  components = components_lib.resolve(config)
  _check_staleness(config)
  if config.rollout.engine_shares_devices:
    from stppo_jax.training import offload

    offload.check(sharding.mesh_of(config.mesh))
  if config.rollout.allocation != 'even' and components.env.rows_per_episode > 1:
    raise types.UserError(
        f'config.rollout.allocation={config.rollout.allocation!r} reads one score of an episode, '
        'and each role of this environment has its own: set it to even'
    )
  if config.rollout.engine and components.env.is_program:
    raise types.UserError(
        f'config.rollout.engine={config.rollout.engine!r}: agent programs talk to the gateway of '
        'the run, which samples itself: leave it empty'
    )
  if config.rollout.replay:
    from stppo_jax.rollout import saved

    hosts.by_writer(saved.check_has, config.rollout.replay, config.train.updates)
    if config.train.updates:
      read_batch = _make_replay(components, variant)
      read_batch(1)
  hosts.require_same('config', dataclasses.asdict(config))
  return variant, components


def _check_staleness(config):
  """Refuses to sample in a thread where programs of two threads may block each other.

  Choice: several simulated devices on a CPU are allowed. XLA matches a collective's devices by its
  program run, in any order, if it has enough threads. Each device that waits in a collective keeps
  one, so the command and the tests set NPROC=64. A program that calls `loop.start` on simulated
  devices must do so too. An accelerator has one queue per device. Two threads may fill two queues
  in different orders, and then each device waits for the other one forever.
  """
  staleness = config.pipeline.staleness
  if not staleness or config.rollout.replay or config.rollout.engine:
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


def load_inputs(components: Components, variant: Variant) -> None:
  """Loads everything but the weights: tokenizer, retriever, tasks. Checks that it fits together."""
  config = components.config
  tasks = components.tasks
  components.load()
  components.check_prompts(tasks)
  components.check_prompts(components.held_out)
  tasks_lib.warn_of_overlap(tasks, components.held_out)
  tokenizer = components.tokenizer
  if config.rollout.demonstrations:
    from stppo_jax.rollout import demonstrations

    source = demonstrations.load(config.rollout.demonstrations, tokenizer)
    demonstrations.check_tasks(config.rollout.demonstrations, source, components.env, tasks)
  if config.teacher.folder:
    prepare.check_teacher(config, tokenizer)
    prepare.check_weights(config, 'tokens', config.teacher.folder)
  if 'uniform' in variant.needs:
    from stppo_jax.models import vocabulary  # few objectives need it

    vocabulary.check_linear(prepare.load_shape(config))
  head, critic_head = learner_lib.model_heads(config, variant)
  prepare.check_weights(config, head, None, variant.value_labels)
  if critic_head:
    critic_folder = config.model.critic_folder or None
    prepare.check_weights(config, critic_head, critic_folder, variant.value_labels)
  server = _make_teacher(config)
  if server is not None:
    hosts.by_writer(server.check, tokenizer, config.rollout.max_total)


def setup(components: Components, variant: Variant) -> tuple[learner_lib.Learners, agent_lib.Agent]:
  """Loads the weights; returns the learners, and the agent that plays. Compiles nothing."""
  config = components.config
  learners = learner_lib.build(
      config,
      variant,
      prepare.load_policy,
      components.policies,
      components.tokenizer.pad_id,
      _make_teacher(config),
  )
  agent = agents.make_agent(config, components, learners.spec.actor, learners.mesh)
  return learners, agent


def _make_teacher(config):
  """Makes the client of config.teacher.address; None without one."""
  options = config.teacher
  if not options.address:
    return None
  from stppo_jax.training import teacher

  return teacher.TeacherServer(options.address, options.model, options.max_outage_s)


def make_batches(
    config: Config,
    agent: agent_lib.Agent,
    policy: Callable[[sequences.PolicyParams], sequences.PolicyParams],
    tasks: list[types.Task],
    stop_signal: StopSignal,
) -> batches_lib.Batches:
  """Makes the batches of a run: its tasks, and how they are played.

  The signal ends a batch in progress. `policy` combines trained with frozen
  parameters, as `Learners.policy` does.
  """
  group_size = config.rollout.group_size
  agent.set_stop_signal(stop_signal)
  make: type[batches_lib.Batches] = batches_lib.Batches
  if config.rollout.engine and not agent.env.is_program:
    from stppo_jax.rollout import engines

    make = engines.RemoteBatches
  return make(
      agent,
      policy,
      _make_stream(config, tasks),
      group_size,
      config.seed,
      config.retriever.max_failed_share,
      config.retriever.max_outage_s,
      stop_signal,
      max_num_gen_batches=config.rollout.max_num_gen_batches,
      max_failed=config.rollout.max_failed,
      rows_per_episode=agent.env.rows_per_episode,
      demonstrator=_make_demonstrator(config, agent, stop_signal),
      allocation=_make_allocation(config),
  )


def _make_stream(config, tasks):
  """Makes the order of the tasks."""
  if not config.env.mix:
    per_batch = config.train.episodes // config.rollout.group_size
    return tasks_lib.TaskStream(tasks, per_batch, config.seed)
  from stppo_jax.data import mix

  counts = components_lib.mix_rules().questions_per_batch(config)
  return mix.MixStream(tasks, counts, config.seed)


def _make_allocation(config):
  """Makes the allocation of episodes to questions; None if it is even."""
  rollout = config.rollout
  if rollout.allocation == 'even':
    return None
  from stppo_jax.systems import dars

  return dars.Allocation(
      rule=rollout.allocation,
      first_rows=rollout.first_rows or rollout.group_size // 2,
      max_rows=rollout.max_group or 4 * rollout.group_size,
  )


def _make_demonstrator(config, agent, stop_signal):
  """Makes the player of config.rollout.demonstrations; None without them."""
  rollout = config.rollout
  if not rollout.demonstrations:
    return None
  from stppo_jax.rollout import demonstrations

  return demonstrations.Demonstrator(
      source=demonstrations.load(rollout.demonstrations, agent.tokenizer),
      env=agent.env,
      tokenizer=agent.tokenizer,
      limits=prepare.limits(config),
      per_group=rollout.demonstrated,
      every=rollout.demonstrate_every,
      strict=rollout.max_failed == 0,
      guard=prepare.make_guard(config, stop_signal),
  )


def _make_replay(components, variant):
  """Makes the reader of the batches of config.rollout.replay."""
  from stppo_jax.rollout import saved

  config = components.config
  return saved.Replay(
      config.rollout.replay,
      prepare.load_tokenizer(config),
      config.train.mini_batch,
      config.train.length_buckets[-1],
      config.train.episodes,
      components.env,
      variant.needs_groups,
      config.rollout.routing_replay == 'sampling',
  )


def free_devices(config: Config, stop_signal: StopSignal) -> None:
  """Puts the engines to sleep that share the devices of the run, if there are any."""
  if config.rollout.engine_shares_devices:
    from stppo_jax.rollout import engines

    engines.put_to_sleep(config, stop_signal)


@contextlib.contextmanager
def open_run(
    components: Components,
    learners: learner_lib.Learners,
    agent: agent_lib.Agent,
    workdir: str,
    stop_signal: StopSignal = NEVER,
    profile: int = 0,
    skip_through: int | None = None,
) -> Iterator['Run']:
  """Context manager; yields the run in `workdir`, from its newest checkpoint on.

  After a rollback the batches up to `skip_through` are skipped.
  """
  config = components.config
  variant = learners.spec.variant
  _log_start(components, learners.mesh)
  run_over = StopSignal(stop_signal.is_set)  # set at the end, too: it stops what samples ahead
  if learners.teacher is not None:
    learners.teacher.stop_signal = run_over
  batches = make_batches(config, agent, learners.policy, components.tasks, run_over)
  with contextlib.ExitStack() as resources:
    settings = config.train
    checkpoints = recovery.RunCheckpoints(
        workdir, settings.keep_checkpoints, settings.on_save_error, learners.num_bytes
    )
    resources.enter_context(checkpoints)
    progress, sampled_ahead = checkpoints.resume(learners, batches, skip_through)
    first = progress.updates
    resources.enter_context(_compiling_ahead(components, learners, settings.updates - first))
    policy = learners.policy(learners.actor)
    if config.rollout.engine_shares_devices:
      from stppo_jax.rollout import engines
      from stppo_jax.training import offload

      assert isinstance(agent, engines.RemoteAgent)
      agent.trainer = offload.DeviceArrays(learners)
    opened = agent.opened(workdir, first, policy, components.tasks, run_over)
    resources.enter_context(opened)
    del policy, opened
    journal = journal_lib.Journal(
        workdir,
        dataclasses.asdict(config),
        first,
        agent.env.core_metrics,
        progress.unfinished is not None,
        skip_through is not None,
    )
    resources.enter_context(journal)
    pipeline = resources.enter_context(_make_pipeline(components, variant, batches, sampled_ahead))
    del sampled_ahead  # the pipeline frees the parameters in it, once they have sampled
    # Called before the exit of the pipeline, which waits for the batch in progress.
    resources.callback(run_over.set)
    before_update = resources.enter_context(
        timing_lib.trace_updates(f'{workdir}/profile', profile, first, settings.updates)
    )
    yield Run(
        config=config,
        learners=learners,
        agent=agent,
        held_out=components.held_out,
        batches=batches,
        pipeline=pipeline,
        checkpoints=checkpoints,
        journal=journal,
        progress=progress,
        stop_signal=stop_signal,
        before_update=before_update,
        timing=timing_lib.Timing(),
    )


@contextlib.contextmanager
def _compiling_ahead(components, learners, num_updates):
  """Context manager in which the update is compiled, while other things are done.

  Choice: nothing is compiled ahead where the rows of a batch are not known. The episodes of an
  agent program, and saved ones, have any number of them. Batches of a mix may have a further
  field, with the weights of their rows.
  """
  config = components.config
  env = components.env
  if num_updates > 0 and not (env.is_program or config.rollout.replay or config.env.mix):
    learners.compile_ahead(config.train.episodes, config.rollout.group_size, env.roles)
  try:
    yield
  finally:
    if learners.compilation is not None:
      learners.compilation.cancel()


def _log_start(components, mesh):
  config = components.config
  logging.info(
      '%s: %s, %d x %s as %s; %d tasks to train on, %d held out',
      config.name,
      config.algorithm.variant,
      mesh.size,
      jax.devices()[0].device_kind,
      dict(mesh.shape),
      len(components.tasks),
      len(components.held_out),
  )


def _make_pipeline(components, variant, batches, ahead):
  """Makes the pipeline that samples the batches, or that reads those of config.rollout.replay."""
  config = components.config
  if not config.rollout.replay:
    return pipeline_lib.Pipeline(
        batches.sample, config.pipeline.staleness, ahead, batches.copy, batches.receive
    )
  logging.info('nothing is sampled to train on: batches are those of %s', config.rollout.replay)
  replay = _make_replay(components, variant)

  def read(unused_params, number, unused_staleness):
    try:
      return replay(number)
    except types.UserError as error:  # the updates before are kept
      raise types.RunError(str(error)) from error

  return pipeline_lib.Pipeline(read, 0)


@dataclasses.dataclass
class Run:
  """What happens around each update of `loop.train`."""

  config: Config
  learners: learner_lib.Learners
  agent: agent_lib.Agent
  held_out: list[types.Task]
  batches: batches_lib.Batches  # how the batches are played
  pipeline: pipeline_lib.Pipeline  # gives the batches
  checkpoints: recovery.RunCheckpoints
  journal: journal_lib.Journal
  progress: recovery.Progress
  stop_signal: StopSignal
  before_update: Callable[[int], None]  # is called with the number of updates done
  timing: timing_lib.Timing  # seconds of each phase of the update in progress
  is_stopped: bool = False
  sampled: batching.Sampled | None = None  # the batch of an update that is not done
  records: episodes_lib.Records = list
  scores: dict[str, float] = dataclasses.field(default_factory=dict)  # from the last evaluation

  def remaining_updates(self) -> Iterator[int]:
    """Yields the numbers of the updates to come, until a stop is requested on any process."""
    progress = self.progress
    all_stop = hosts.together(self.stop_signal)
    while not self.is_stopped and progress.updates < self.config.train.updates:
      if all_stop.is_set():
        return
      self.before_update(progress.updates)
      yield progress.updates + 1

  @contextlib.contextmanager
  def saving_on_error(self) -> Iterator[None]:
    """Context manager of an update: a stop ends the loop; at an error the state is saved first."""
    self.timing = timing_lib.Timing()
    try:
      with jax.profiler.TraceAnnotation('step'):
        yield
    except types.Stopped:
      self.is_stopped = True
      if self.sampled is not None:
        self.pipeline.put_back(self.sampled)
    except (recovery.Stuck, checkpoint.SaveError):
      raise  # without a save: this state must not be the newest checkpoint, or cannot be written
    except Exception as error:
      self.checkpoints.save_on_error(error, self.progress, self.learners.state)
      raise

  def begin(self) -> None:
    """Evaluates the untrained policy, or repeats the evaluation that a stop has interrupted."""
    n = self.progress.updates
    unfinished = self.progress.unfinished
    if n == 0:
      self.journal.write(0, self.evaluate(0, {}))
    elif unfinished is not None:
      metrics = self.evaluate(n, unfinished)
      # Choice: does not check that update n was finite. A rollback would come back here, to n.
      alarms = self.journal.log_update(n, metrics)
      self.progress.logged = n
      self.checkpoints.note_score(n, self.progress.score)  # from now on it is not repeated
      self.journal.warn(n, alarms)

  def sample(self, n: int) -> batching.Sampled:
    """Returns the batch of update n: tasks, and the episodes that the agent played on them.

    Choice: a rollback passes over batches, so the number of a batch is not always n.
    """
    with self.timing('wait'):
      number = n + self.progress.skipped_batches
      self.sampled = self.pipeline.take(self.learners.start_actor, number)
    if self.config.env.mix:
      components_lib.mix_rules().weigh(self.config, self.sampled.episodes)
    components_lib.check_jax()  # the code of users has run
    return self.sampled

  def measure(
      self, n: int, sampled: batching.Sampled, policy_updates: Sequence[summary.PolicyUpdate]
  ) -> dict[str, float]:
    """Returns the metrics of update n and writes its episodes.

    From now on `Progress` counts update n as done.
    """
    self.progress.updates = n
    self.progress.score = None
    self.sampled = None
    with self.timing('records'):
      metrics = summary.update_summary(policy_updates)
      episodes = [episode for part in policy_updates for episode in part.episodes]
      metrics |= episodes_lib.summarize_update(episodes)
      counts = outcomes.count_update([(x.episodes, x.step_metrics) for x in policy_updates])
      metrics |= outcomes.as_metrics('outcome', counts)
      self.records = self._make_records(n, sampled, policy_updates, metrics['actor/skipped'])
    self.journal.record('train', n, self.records)
    learners = self.learners
    steps = [step for part in policy_updates for step in part.steps]
    num_row_tokens = packing.num_tokens(steps)
    num_places = sum(packing.num_places(step.packing) for step in steps)
    num_tokens = num_row_tokens / self.config.train.epochs
    step_s = sum(self.timing.values())
    num_programs = sum(self.agent.sampler.compiled_variants().values())
    num_programs += learners.functions.num_compilations()
    metrics |= sampled.measured
    metrics |= self.timing.metrics()
    metrics |= metrics_lib.device_memory()
    metrics |= episodes_lib.turn_ages(sampled.episodes, n)
    host_memory_gb = metrics_lib.host_memory_gb()
    if learners.mesh.devices.flat[0].platform == 'cpu':
      malloc.trim()
    return metrics | {
        'timing_s/step': step_s,
        'pipeline/staleness': sampled.staleness,
        'perf/throughput': num_tokens / step_s / learners.mesh.size,  # per device, as verl
        'perf/padding': learners.bins.padding(steps),
        'perf/shared_train_tokens': 1 - num_places / max(num_row_tokens, 1),
        'perf/compilations': num_programs,
        'perf/failed_saves': self.checkpoints.num_failed,
        'perf/host_memory_gb': host_memory_gb,
    }

  def _make_records(self, n, sampled, policy_updates, skipped):
    """Returns the records of the episodes, token by token, if they are to be written."""
    log = self.config.log
    is_wanted = log.episodes and n % log.episodes_every == 0
    if not is_wanted and skipped < self.config.train.max_nonfinite:
      return list
    has_values = self.learners.spec.has_values
    tokenizer = self.agent.tokenizer
    records = []
    for part in policy_updates:
      rows = dataclasses.replace(sampled, episodes=part.episodes)
      own_records = episodes_lib.update_records(
          rows, tokenizer, part.batch, part.step_metrics, n, has_values
      )
      records.append(own_records)
    return episodes_lib.join_records(records)

  def evaluation_is_due(self, n: int) -> bool:
    """Whether the policy is evaluated after update n."""
    every = self.config.eval.every
    return n == self.config.train.updates or bool(every and n % every == 0)

  def evaluate(self, n: int, metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of update n with the greedy scores after it, and writes the episodes.

    Raises Stopped when a stop is requested. Waits for a retriever that fails, as sampling does.
    """
    self.progress.unfinished = metrics
    with self.pipeline.idle():
      started = time.perf_counter()  # without the wait for a batch that is being sampled
      policy = self.batches.copy(self.learners.actor)
      keys = episode_lib.row_keys(hosts.random_key(self.config.seed), self.held_out)

      def play():
        return self.agent.play(
            policy, self.held_out, keys, greedy=True, stop_signal=self.stop_signal
        )

      episodes, _ = self.batches.until_answered(play)
      gap = self.agent.gap(self.learners.policy(self.learners.actor))
      scores = scores_lib.scores(episodes)
    batches_lib.check_environment(episodes, self.config.rollout.max_failed)
    self.journal.log_evaluation(n, scores, episodes, self.agent.tokenizer)
    self.scores = scores | {'timing_s/testing': time.perf_counter() - started}
    if gap is not None:
      self.scores['engine/gap'] = gap
    self.progress.unfinished = None
    self.progress.score = self.journal.main_score(scores)
    return metrics | self.scores

  def log(self, n: int, metrics: dict[str, float]) -> None:
    """Writes the metrics of update n. Raises an error if it was not finite or is unhealthy."""
    alarms = self.journal.log_update(n, metrics)
    self.progress.logged = n
    self._check_finite(n, metrics)
    self.journal.warn(n, alarms)

  def _check_finite(self, n, metrics):
    """Raises Stuck if parameters are not finite, or if too many steps in a row were skipped."""
    number = n + self.progress.skipped_batches
    for name in ('stppo/step_norm', 'critic/step_norm'):
      if not math.isfinite(metrics.get(name, 0.0)):
        raise recovery.Stuck(f'update {n} left parameters that are not finite ({name})', number)
    skipped = metrics['actor/skipped']
    if skipped < self.config.train.max_nonfinite:
      return
    path = self.journal.dump(n, self.records)
    cause = 'gradients or losses were not finite'
    divisor = metrics.get('stppo/divisor', 1.0)
    norm = metrics.get('stppo/grad_norm', math.nan)
    if math.isfinite(norm) and not math.isfinite(divisor):
      divisor_name = self.learners.spec.variant.described()['divisor']
      cause = f'the divisor {divisor_name!r} gave no positive number, so nothing was applied'
    raise recovery.Stuck(
        f'{cause} in {skipped} optimizer steps in a row, up to update {n}: their episodes are in '
        f'{path}',
        number,
    )

  def save(self, n: int) -> None:
    """Reports a save that failed, and begins the next one if it is due after update n.

    Choice: an evaluation makes no checkpoint due, because a large state takes long to write. The
    best checkpoint is chosen among those that are due and have a score.
    """
    self.checkpoints.check()
    every = self.config.train.checkpoint_every
    if every and n % every == 0:
      self._save()

  def finish(self) -> dict[str, float]:
    """Saves the state of the last update, and returns the scores of the last evaluation."""
    if self.progress.updates > self.progress.resumed:
      self._save()
    self.journal.log_end(self.progress.updates)
    return self.scores

  def _save(self):
    ahead = self.batches.to_save(self.pipeline.contents())
    self.checkpoints.save_run(self.progress, self.learners.state, ahead)
