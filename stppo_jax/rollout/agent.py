"""The agent of a config: parameters and tasks in, episodes out, for training and evaluation."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import stepping
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sequences
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import UserError


@dataclasses.dataclass
class Agent:
  """Turns parameters and questions into episodes."""

  config: Config
  tokenizer: tokenizer_lib.Tokenizer
  model: decoder.ModelConfig  # the policy's shape
  env: factory.EnvFactory  # makes an environment per episode
  retriever: protocol.Retriever | None
  sampler: sequences.PolicySampler  # at the training temperature
  greedy: sequences.PolicySampler  # evaluation's; shares the compiled programs
  report: sequences.Report | None = None  # about the newest `play`
  run: sequences.Play = engine.run  # samples the turns

  def play(
      self,
      params: object,
      tasks: Sequence[types.Task],
      keys: jax.Array,  # [episodes]
      groups: Sequence[int] | None = None,  # None: each episode is one
      greedy: bool = False,
      stop_signal: StopSignal = NEVER,
  ) -> list[types.Episode]:
    """Plays one episode per task, as many at once as the sampler has rows for.

    The keys fix each episode's randomness. Returns the rows of each task, in the order of the
    tasks. `params` are those of the policy, or a `Sampler.copy` of them, or a list of those of
    several policies. Raises Stopped at the signal: while an environment is called, after
    a turn, and at the end, because a retriever that stops at that moment leaves failed episodes.

    Choice: on many hosts rows wait for the environments, because all hosts must launch the same
    programs in the same order. The threads still step the environments of a host together.
    """
    rollout = self.config.rollout
    groups = range(len(tasks)) if groups is None else groups
    seeds = episode_lib.reset_seeds(keys, tasks)
    play_over = StopSignal(stop_signal.is_set)  # set after an error, too: it ends the other calls
    guard = prepare.make_guard(self.config, play_over)
    all_stop = hosts.together(stop_signal)
    map_all: Callable[..., Iterable] = map
    with contextlib.ExitStack() as resources:
      resources.callback(play_over.set)
      envs = [self.env(task, seed, guard) for task, seed in zip(tasks, seeds)]
      if rollout.threads and not self.env.uses_global_random:
        pool = futures.ThreadPoolExecutor(rollout.threads, 'environments')
        resources.callback(pool.shutdown, wait=False, cancel_futures=True)
        map_all = pool.map
      step_all: Callable[..., Sequence] = stepping.step_all
      map_resets = map_all
      if hosts.num_processes() > 1:
        from stppo_jax.rollout import split_envs

        step_all = split_envs.split_steps(envs)
        map_resets = split_envs.split_resets(map_all)

      def step_envs(stepped, texts):
        all_stop.raise_if_set()
        return step_all(stepped, texts, map_all)

      rules = episode_lib.EpisodeRules(
          self.env,
          prepare.limits(self.config),
          step_envs=step_envs,
          map_resets=map_resets,
          threads=rollout.threads if hosts.num_processes() == 1 else 0,
          strict=rollout.max_failed == 0,
      )
      sampler = self.greedy if greedy else self.sampler
      inputs = episode_lib.EpisodeInputs(envs, tasks, groups, keys)
      copy = self.sampler.copy(params)
      episodes, self.report = episode_lib.play(
          sampler, copy, self.tokenizer, inputs, rules, self.run
      )
    all_stop.raise_if_set()
    return episodes

  def set_stop_signal(self, stop_signal: StopSignal) -> None:
    """Gives the retriever the signal of the run, if it takes one."""
    if self.retriever is not None and hasattr(self.retriever, 'stop_signal'):
      self.retriever.stop_signal = stop_signal

  @contextlib.contextmanager
  def opened(
      self,
      workdir: str,
      updates: int,
      params: sequences.PolicyParams,
      tasks: Sequence[types.Task],
      stop_signal: StopSignal,
  ) -> Iterator[None]:
    """Context manager of a run in `workdir`, whose policy `params` has had `updates` updates."""
    # A sampler in this process has nothing to open.
    del workdir, updates, params, tasks, stop_signal
    yield

  def gap(self, params: sequences.PolicyParams) -> float | None:
    """Returns the mean |dlogp| of sampler and trainer with the same weights; None: not measured."""
    del params
    return None


def make_sampler(
    config: Config,
    model: decoder.ModelConfig,
    stop_table: np.ndarray,
    eos_ids: Sequence[int],
    mesh: jax.sharding.Mesh | None = None,
    rows_per_episode: int = 1,
    num_policies: int = 1,
    memory: int = 0,
) -> sampler_lib.Sampler:
  """Returns the sampler of training, sharded for sampling over the devices of `mesh`.

  `memory` is the number of bytes that a device may use. 0: that of the device here.

  Several policies have separate groups, each the same number. Rows that are not split over devices
  can be moved, so that only rows with tokens to prefill are computed. On a CPU their keys are
  stored in tiles. Keys of split rows are not, because tiles are read row by row.
  """
  rollout = config.rollout
  rows = row_sharding(config, model, mesh)
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  is_tiled = device.platform == 'cpu' and rows is None
  cache_tile = decoder.CPU_CACHE_TILE if is_tiled else 0
  buckets = rollout.slot_buckets or sampling.default_slot_buckets(
      rollout.max_total, device.platform
  )
  num_episodes = rollout.rows
  if not num_episodes:
    num_episodes = fitting_episodes(
        config.train.episodes, config, model, mesh, rows_per_episode, memory
    )
  num_rows = rows_per_episode * num_episodes
  width = rollout.width
  if num_policies > 1:
    rows_per_policy = num_rows // num_policies
    width = min(width or num_rows, rows_per_policy)
    num_rows = num_policies * sampling.round_up(rows_per_policy, width)
  return sampler_lib.Sampler(
      dataclasses.replace(model, row_sharding=rows, cache_tile=cache_tile),
      stop_table,
      eos_ids,
      sampling.Sizes(
          rollout.max_total,
          rows=num_rows,
          width=width,
          slot_buckets=buckets,
          chunk_buckets=rollout.chunks,
      ),
      sampling.Distribution(rollout.temperature, rollout.top_k, rollout.top_p),
      rows,
      records_routes=rollout.routing_replay == 'sampling' and model.num_experts > 0,
  )


def fitting_episodes(
    wanted: int,
    config: Config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    rows_per_episode: int = 1,
    memory: int = 0,
) -> int:
  """Returns how many of `wanted` episodes are played at once: all, a half, a quarter, ..

  It is the first number whose keys and values take at most a quarter of the memory of the devices.
  `memory` is as in `make_sampler`. UserError: the processes of the run have different memories.
  """
  cache = jax.eval_shape(lambda: decoder.init_cache(model, 1, config.rollout.max_total))
  row_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((cache.k, cache.v)))
  num_devices = 1 if mesh is None else mesh.size
  available = num_devices * (memory or sharding.memory_of(jax.local_devices()[0])) // 4
  while wanted > 1 and wanted * rows_per_episode * row_bytes > available:
    wanted = -(-wanted // 2)
  advice = 'set config.rollout.rows and config.eval.rows'
  hosts.require_same('episodes that fit the memory', wanted, advice)
  return wanted


def check_caches(sampler: sampler_lib.Sampler) -> None:
  """Raises a UserError if the keys and values of all rows are larger than the devices' memory."""
  rows = sampler.width * sampler.num_groups
  context = sampler.empty.eval_shape(rows, sampler.slot_buckets[-1])
  device = jax.local_devices()[0]
  num_devices = 1
  if sampler.row_sharding is not None:
    num_devices = sampler.row_sharding.num_devices
  needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((context.k, context.v)))
  needed //= num_devices
  memory = sharding.memory_of(device)
  if needed > memory:
    raise UserError(
        f'config.rollout.max_total={sampler.max_slots}: the keys and values of {rows} rows take '
        f'{needed / 2**30:.0f} GiB on each device, which has {memory / 2**30:.0f} GiB: lower '
        'config.rollout.rows, or let engines sample (config.rollout.engine)'
    )


def row_sharding(
    config: Config, model: decoder.ModelConfig, mesh: jax.sharding.Mesh | None
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of the sampler's rows over the devices of `mesh`; None: one device."""
  if mesh is None or mesh.size == 1:
    return None
  from stppo_jax.rollout import sampling_mesh

  return sharding.rows(sampling_mesh.make_mesh(mesh, model, config.rollout.mesh))
