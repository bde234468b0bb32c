"""Runs whose turns are sampled by engines in other processes: the agent and the batches.

Only a run with config.rollout.engine imports this module.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import os

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.envs import stepping
from stppo_jax.models import decoder
from stppo_jax.models import hf_export
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import batches
from stppo_jax.rollout import batching
from stppo_jax.rollout import directory
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.rollout import remote
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import sequences
from stppo_jax.rollout import servers
from stppo_jax.rollout import shared_devices
from stppo_jax.rollout import weight_folders
from stppo_jax.stop_signal import StopSignal


@dataclasses.dataclass(frozen=True)
class RemoteBatches(batches.Batches):
  """Batches that engines sample. Process 0 plays them, and all processes get the episodes.

  Sampling runs no computation on devices. So it can run in a thread during training, with any
  number of devices and processes.
  """

  agent: 'RemoteAgent'

  def sample(self, params: object, number: int, staleness: int) -> batching.Sampled:
    """Plays the batch. Process 0 calls it, from any thread."""
    with hosts.alone(), self.agent.engines_awake():
      sampled = super().sample(params, number, staleness)
    sampled.measured['engine/push_s'] = self.agent.take_push_s()
    return sampled

  def receive(self, wait: Callable[[], batching.Sampled]) -> batching.Sampled:
    """Returns the batch that `wait` returns on process 0."""
    if hosts.num_processes() == 1:
      return wait()
    return self.restored(hosts.by_writer(lambda: batches.to_json(wait())))

  def to_save(
      self, ahead: Sequence[batching.Sampled | batching.Unsampled]
  ) -> list[batching.Sampled | batching.Unsampled]:
    """Returns those of the batches ahead that a checkpoint holds.

    Choice: leaves out batches that are still to be sampled. A resumed run samples them with the
    weights that it has then.
    """
    return [batch for batch in ahead if isinstance(batch, batching.Sampled)]

  def until_answered(
      self, play: Callable[[], list[types.Episode]]
  ) -> tuple[list[types.Episode], int]:
    """Calls `play_through` with the limits of this run, on process 0."""
    if hosts.num_processes() == 1:
      with self.agent.engines_awake():
        return super().until_answered(play)

    def play_alone():
      with hosts.alone():
        episodes, replays = batches.Batches.until_answered(self, play)
      return [episode.to_dict() for episode in episodes], replays

    records, replays = hosts.by_writer(play_alone)
    return list(map(types.Episode.from_dict, records)), replays


@dataclasses.dataclass
class RemoteAgent(agent_lib.Agent):
  """Turns parameters and questions into episodes, whose turns engines in other processes sample.

  Its remote samplers exist while it is `opened`.
  """

  stop_table: np.ndarray = dataclasses.field(kw_only=True)  # see `Sampler`
  trainer: shared_devices.Offloadable | None = None  # its devices are those of the engines

  @contextlib.contextmanager
  def opened(
      self,
      workdir: str,
      updates: int,
      params: sequences.PolicyParams,
      tasks: Sequence[types.Task],
      stop_signal: StopSignal,
  ) -> Iterator[None]:
    """Context manager of a run in `workdir`, whose policy `params` has had `updates` updates.

    Connects the engines, and compares their log-probs with those of the trainer.
    """
    rollout = self.config.rollout
    model = dataclasses.replace(self.model, head='tokens')
    has_adapters = self.config.model.lora_rank > 0
    kind = rollout.engine_kind
    root = rollout.engine_folder or os.path.join(workdir, 'weights')
    folders = weight_folders.WeightFolders(
        hosts.by_writer(weight_folders.folder_of_run, root, workdir),
        first_version=updates,
        num_versions=self.config.pipeline.staleness + 2,
        write=functools.partial(_write, model, kind, has_adapters),
    )
    rows = self.env.rows_per_episode * (rollout.rows or self.config.train.episodes)
    api = make_api(self.config, tuple(self.tokenizer.eos_ids))
    # Engines look for stop strings in thoughts, too. Without them, `make_turn` alone cuts the turn.
    stop_strings = () if self.env.skips_thoughts else self.env.stop_strings
    fleet = remote.Fleet(rollout, api, folders, self.stop_table, stop_strings, rows, stop_signal)
    distribution = sampling.Distribution(rollout.temperature, rollout.top_k, rollout.top_p)
    self._remote_sampler = remote.RemoteSampler(fleet, distribution)
    self.sampler = self._remote_sampler
    self.greedy = remote.RemoteSampler(fleet, sampling.GREEDY)
    self._prompts = hosts.by_writer(self._probe_prompts, tasks)
    self._score = jax.jit(functools.partial(_score, self.model))
    if self.trainer is not None:
      self._sharing = shared_devices.Sharing(fleet, self.trainer)
    with fleet:
      self._check(params, at_start=True)
      yield

  def engines_awake(self) -> contextlib.AbstractContextManager[None]:
    """Context manager in which the engines may sample, see `shared_devices`."""
    if self.trainer is None:
      return contextlib.nullcontext()
    return self._sharing.engines_awake()

  def gap(self, params: sequences.PolicyParams) -> float | None:
    """Returns the mean |dlogp| of engines and trainer with the same weights; see `remote`."""
    return self._check(params)

  def take_push_s(self) -> float:
    """Returns the seconds that the engines took for new weights since the last call."""
    return self._remote_sampler.fleet.take_push_s()

  def _check(self, params, at_start=False):
    def score(tokens, temperature):
      scored = params if self.trainer is None else self.trainer.policy()
      return hosts.fetch(self._score(scored, tokens, temperature))

    return remote.check_agreement(
        self._remote_sampler,
        self._remote_sampler.copy(params),
        self._prompts,
        score,
        at_start,
        self.engines_awake,
    )

  def _probe_prompts(self, tasks):
    """Returns the prompts of the first tasks whose environment starts. UserError: none does."""
    longest = episode_lib.longest_prompt(prepare.limits(self.config))
    guard = prepare.make_guard(self.config)
    prompts = []
    error = 'there are no tasks'
    for task in tasks:
      seed = task.seed or 0
      observation, info = stepping.reset(self.env(task, seed, guard), seed)
      if 'environment_error' in info:
        error = f'{info["environment_error"]}, on task {task.id!r}'
        continue
      ids = episode_lib.first_prompt(self.tokenizer, observation, info)
      prompts.append(ids[:longest])
      if len(prompts) == remote.NUM_PROBES:
        break
    if not prompts:
      raise types.UserError(
          f'no task of this run gives a prompt to compare engines and trainer with ({error}): '
          'correct the environment'
      )
    return prompts


def make_api(config: Config, eos_ids: tuple[int, ...] = ()) -> servers.ServerApi:
  """Returns the interface of the engines of a config."""
  kind = config.rollout.engine_kind
  if kind != 'vllm':
    return servers.APIS[kind](eos_ids)
  sends_adapters = config.model.lora_rank > 0
  make = servers.VllmAdapterApi if sends_adapters else servers.VllmApi
  return make(eos_ids, config.rollout.engine_shares_devices)


def put_to_sleep(config: Config, stop_signal: StopSignal) -> None:
  """Frees the devices of the engines before the trainer loads its weights.

  Waits for engines that still load their model. Raises UserError for one that cannot sleep.
  """
  rollout = config.rollout
  api = make_api(config)
  for address in directory.addresses(rollout.engine):
    engine = remote.RemoteEngine(address, api, rollout.engine_timeout_s, '', stop_signal)
    engine.await_sleep_mode()


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
  if has_adapters:
    from stppo_jax.models import lora

  if has_adapters and engine_kind == 'vllm':
    adapters = hosts.fetch(lora.adapters(params))
    if hosts.is_writer():
      layers_with = functools.partial(decoder.layers_with, model)
      lora.save_peft(folder, adapters, model.lora_scale, layers_with)
    return
  if has_adapters:
    params = jax.jit(lora.merge, static_argnums=2)(params, {}, model.lora_scale)
  if model.tie_embeddings and engine_kind == 'vllm':
    model, params = decoder.untied(model, params)
  hf_export.save_hf(folder, model, params, dtype=model.dtype)


def with_engines(agent: agent_lib.Agent) -> RemoteAgent:
  """Returns an agent with the engines of config.rollout.engine as its sampler."""
  fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
  fields['run'] = remote.run
  sampler = agent.sampler
  assert isinstance(sampler, sampler_lib.Sampler)
  return RemoteAgent(**fields, stop_table=sampler.stop_table)
