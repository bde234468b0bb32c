"""The agent of a config: parameters and tasks in, episodes out, for training and evaluation."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
import threading
from typing import Any

import jax
import numpy as np

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import stepping
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import lora
from stppo_jax.models import sharding
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import layout
from stppo_jax.rollout import prepare
from stppo_jax.rollout import remote
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import servers


@dataclasses.dataclass
class Agent:
  """Turns parameters and questions into episodes."""

  config: Any  # the run's Config
  tokenizer: tokenizer_lib.Tokenizer
  model: decoder.ModelConfig  # the policy's shape
  env: factory.EnvFactory  # makes an environment per episode
  retriever: Any  # retrieval.protocol.Retriever, or None
  sampler: Any  # a `Sampler` at the training temperature, or a `RemoteSampler`
  greedy: Any  # evaluation's; shares the compiled programs
  report: engine.Report | None = None  # about the newest `play`
  run: Callable[..., engine.Report] = engine.run  # plays the sequences, see `episode.play`

  def play(
      self,
      params: dict,
      tasks: Sequence[types.Task],
      keys: jax.Array,  # [episodes]
      groups: Sequence[int] | None = None,  # None: each episode is one
      greedy: bool = False,
      give_up: Callable[[], bool] | None = None,
  ) -> list[types.Episode]:
    """Plays one episode per task, as many at once as the sampler has rows for.

    The keys fix each episode's randomness. Returns the rows of each task, in the order of the
    tasks. `params` are those of the policy, or a `Sampler.copy` of them, or a list of those of
    several policies. Raises Stopped when `give_up()` is true: while an environment is called, after
    a turn, and at the end, because a retriever that gives up at that moment leaves failed episodes.

    Choice: on many hosts rows wait for the environments, because all hosts must launch the same
    programs in the same order. The threads still step the environments of a host together.
    """
    rollout = self.config.rollout
    groups = range(len(tasks)) if groups is None else groups
    seeds = episode_lib.reset_seeds(keys, tasks)
    is_over = threading.Event()  # ends calls that are still in progress after an error
    gives_up = lambda: is_over.is_set() or (give_up is not None and give_up())
    guard = prepare.make_guard(self.config, gives_up)
    map_all: Callable[..., Iterable] = map
    with contextlib.ExitStack() as resources:
      resources.callback(is_over.set)
      envs = [self.env(task, seed, guard) for task, seed in zip(tasks, seeds)]
      step_all = hosts.split_steps(envs)
      if rollout.threads and not self.env.uses_global_random:
        pool = futures.ThreadPoolExecutor(rollout.threads, 'environments')
        resources.callback(pool.shutdown, wait=False, cancel_futures=True)
        map_all = pool.map

      def step_envs(stepped, texts):
        if give_up is not None:
          hosts.raise_if_stopped(give_up)
        return step_all(stepped, texts, map_all)

      rules = episode_lib.EpisodeRules(
          self.env,
          prepare.limits(self.config),
          step_envs=step_envs,
          map_resets=hosts.split_resets(map_all),
          threads=rollout.threads if hosts.num_processes() == 1 else 0,
          strict=rollout.max_failed == 0,
      )
      sampler = self.greedy if greedy else self.sampler
      inputs = episode_lib.EpisodeInputs(envs, tasks, groups, keys)
      copy = self.sampler.copy(params)
      episodes, self.report = episode_lib.play(
          sampler, copy, self.tokenizer, inputs, rules, self.run
      )
    if give_up is not None:
      hosts.raise_if_stopped(give_up)
    return episodes


@dataclasses.dataclass
class RemoteAgent(Agent):
  """Turns parameters and questions into episodes, whose turns engines in other processes sample.

  Its samplers exist while it is `opened`.
  """

  stop_table: np.ndarray = dataclasses.field(kw_only=True)  # see `Sampler`

  @contextlib.contextmanager
  def opened(
      self,
      workdir: str,
      updates: int,
      params: Any,
      tasks: Sequence[types.Task],
      give_up: Callable[[], bool],
  ) -> Iterator[None]:
    """Context manager of a run in `workdir`, whose policy `params` has had so many updates.

    Connects the engines, and compares their log-probs with those of the trainer.
    """
    rollout = self.config.rollout
    model = dataclasses.replace(self.model, head='tokens')
    has_adapters = self.config.model.lora_rank > 0
    kind = rollout.engine_kind
    sends_adapters = has_adapters and kind == 'vllm'
    make_api = servers.VllmAdapterApi if sends_adapters else servers.APIS[kind]
    root = rollout.engine_folder or os.path.join(workdir, 'weights')
    folders = remote.WeightFolders(
        hosts.by_writer(remote.folder_of_run, root, workdir),
        first_version=updates,
        num_versions=self.config.pipeline.staleness + 2,
        write=functools.partial(_write, model, kind, has_adapters),
    )
    rows = self.env.rows_per_episode * (rollout.rows or self.config.train.episodes)
    api = make_api(tuple(self.tokenizer.eos_ids))
    # Engines look for stop strings in thoughts, too. Without them, `make_turn` alone cuts the turn.
    stop_strings = () if self.env.skips_thoughts else self.env.stop_strings
    fleet = remote.Fleet(rollout, api, folders, self.stop_table, stop_strings, rows, give_up)
    distribution = sampling.Distribution(rollout.temperature, rollout.top_k, rollout.top_p)
    self.sampler = remote.RemoteSampler(fleet, distribution)
    self.greedy = remote.RemoteSampler(fleet, sampling.GREEDY)
    self._prompts = hosts.by_writer(self._probe_prompts, tasks)
    self._score = jax.jit(functools.partial(_score, self.model))
    with fleet:
      self.check(params, at_start=True)
      yield

  def check(self, params: Any, at_start: bool = False) -> float | None:
    """Returns the mean |dlogp| of engines and trainer with the same weights; see `remote`."""
    return remote.check_agreement(
        self.sampler,
        self.sampler.copy(params),
        self._prompts,
        lambda tokens, temperature: hosts.fetch(self._score(params, tokens, temperature)),
        at_start,
    )

  def _probe_prompts(self, tasks):
    """Returns the prompts of the first tasks."""
    longest = episode_lib.longest_prompt(prepare.limits(self.config))
    prompts = []
    for task in tasks[: remote.NUM_PROBES]:
      seed = task.seed or 0
      guard = prepare.make_guard(self.config)
      observation, info = stepping.reset(self.env(task, seed, guard), seed)
      ids = episode_lib.first_prompt(self.tokenizer, observation, info)
      prompts.append(ids[:longest])
    return prompts


def _score(model, params, tokens, temperature):
  """Returns the log-probs of tokens [1,T] as the trainer computes them, for any length T.

  The kernels of training take only the lengths of its bins, and run in its layout of rows.
  """
  model = dataclasses.replace(model, attention='plain', row_sharding=None)
  x, _ = decoder.trunk(params, model, tokens)
  logp, _ = decoder.token_logp(params, model, x, tokens, temperature)
  return logp


def _write(model, engine_kind, has_adapters, params, folder):
  """Writes a folder of weights that an engine loads. All processes call it."""
  if has_adapters and engine_kind == 'vllm':
    adapters = hosts.fetch(lora.adapters(params))
    if hosts.is_writer():
      lora.save_peft(folder, adapters, model.lora_scale)
    return
  if has_adapters:
    params = jax.jit(lora.merge, static_argnums=2)(params, {}, model.lora_scale)
  if model.tie_embeddings and engine_kind == 'vllm':
    model, params = decoder.untied(model, params)
  convert.save_hf(folder, model, params, dtype=model.dtype)


def with_engines(agent: Agent) -> RemoteAgent:
  """Returns the agent of training with the engines of config.rollout.engine as its sampler."""
  fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
  fields['run'] = remote.run
  return RemoteAgent(**fields, stop_table=agent.sampler.stop_table)


def make_agent(
    config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    prepared: prepare.Prepared | None = None,
) -> Agent:
  """Builds the agent of a policy of shape `model`, on the devices of `mesh`; None: on the first."""
  prepared = prepared or prepare.prepare(config)
  tokenizer = prepared.tokenizer
  stop_table = tokenizer_lib.stop_automaton(
      tokenizer.token_bytes, prepared.env.stop_strings, prepared.env.skips_thoughts
  )
  rows_per_episode = prepared.env.rows_per_episode
  num_policies = len(prepared.policies)
  sampler = make_sampler(
      config, model, stop_table, tokenizer.eos_ids, mesh, rows_per_episode, num_policies
  )
  eval_rows = sampling.round_up(config.eval.rows, sampler.width) * rows_per_episode
  return Agent(
      config=config,
      tokenizer=tokenizer,
      model=model,
      env=prepared.env,
      retriever=prepared.retriever,
      sampler=sampler,
      greedy=sampler.greedy(eval_rows),
  )


def make_sampler(
    config,
    model: decoder.ModelConfig,
    stop_table: np.ndarray,
    eos_ids: Sequence[int],
    mesh: jax.sharding.Mesh | None = None,
    rows_per_episode: int = 1,
    num_policies: int = 1,
) -> sampler_lib.Sampler:
  """Returns the sampler of training, in the sampling layout over the devices of `mesh`.

  Each of several policies has groups of its own, all as many. Rows that are not split can be moved:
  only rows with something to prefill are computed. On a CPU their keys lie in tiles. Keys of split
  rows do not, because reading from tiles goes row by row.
  """
  rollout = config.rollout
  rows = row_sharding(config, model, mesh)
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  is_tiled = device.platform == 'cpu' and rows is None
  cache_tile = decoder.CPU_CACHE_TILE if is_tiled else 0
  buckets = rollout.slot_buckets or sampling.default_slot_buckets(
      rollout.max_total, device.platform
  )
  num_rows = rows_per_episode * (rollout.rows or config.train.episodes)
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


def row_sharding(
    config, model: decoder.ModelConfig, mesh: jax.sharding.Mesh | None
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of the sampler's rows over the devices of `mesh`; None: one device."""
  if mesh is None or mesh.size == 1:
    return None
  return sharding.rows(layout.make_mesh(mesh, model, config.rollout.mesh))
