"""Builds an agent from a config: tokenizer, model shape, environment, retriever and samplers.

Training and evaluation share it: parameters and tasks in, episodes out. `prepare` and the checks
come before weights are loaded.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import os
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import plugins
from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import protocol
from stppo_jax.models import convert
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import layers
from stppo_jax.models import sharding
from stppo_jax.rollout import engine
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import layout
from stppo_jax.rollout import sampler as sampler_lib
from stppo_jax.rollout import sampling
from stppo_jax.rollout import seams
from stppo_jax.types import UserError

_ASSETS = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'assets')
EMBEDDED_MODEL = os.path.join(_ASSETS, 'tiny')
EMBEDDED_TEMPLATE = os.path.join(_ASSETS, 'tiny_chat_template.jinja')


@dataclasses.dataclass
class Agent:
  """Turns parameters and questions into episodes."""

  config: Any  # the run's Config
  tokenizer: chat.Tokenizer
  model: decoder.ModelConfig  # of the policy
  env: protocol.Kind  # makes an environment per episode
  retriever: Any  # retrieval.protocol.Retriever, or None
  sampler: sampler_lib.Sampler  # at the training temperature
  greedy: sampler_lib.Sampler  # of evaluation, with the same compiled programs
  report: engine.Report | None = None  # of the newest `play`

  def play(
      self,
      params: dict,
      tasks: Sequence[types.Task],
      keys: jax.Array,  # [episodes]
      groups: Sequence[int] | None = None,  # None: each episode is one
      greedy: bool = False,
      give_up: Callable[[], bool] | None = None,
  ) -> list[types.Episode]:
    """Plays one episode per task, `rows` at a time; keys [B] fix each episode's randomness.

    Returns a row per task, or one per task and role, in their order.

    `params` are the policy's, or a `Sampler.copy` of them, which is made here otherwise. A list has
    those of each role.
    Raises Stopped after a turn at which `give_up()` is true, and at the end: a retriever that gives
    up at that moment leaves failed episodes. Choice: on many hosts rows wait for the environments,
    because all hosts must launch the same programs in the same order. The threads still step the
    environments of a host together.
    """
    rollout = self.config.rollout
    groups = range(len(tasks)) if groups is None else groups
    seeds = episode_loop.episode_seeds(keys)
    envs = [  # samples of a seeded task play the same instance
        self.env(task, seed if task.seed is None else task.seed) for task, seed in zip(tasks, seeds)
    ]
    step_all = hosts.split_steps(envs)

    def step_envs(stepped, actions):
      if give_up is not None:
        hosts.end_if(give_up)
      return step_all(stepped, actions)

    map_all: Callable[..., Iterable] = map
    with contextlib.ExitStack() as resources:
      if rollout.threads and not self.env.uses_global_random:
        pool = futures.ThreadPoolExecutor(rollout.threads, 'environments')
        resources.callback(pool.shutdown, wait=False, cancel_futures=True)
        map_all = pool.map
        step_all = functools.partial(step_all, map_all=map_all)
      episodes, self.report = episode_loop.play(
          self.greedy if greedy else self.sampler,
          self.sampler.copy(params),
          self.tokenizer,
          episode_loop.Rows(envs, tasks, groups, keys, seeds),
          episode_loop.Rules(
              limits(self.config),
              frame=self.env.frame,
              core_metrics=self.env.core_metrics,
              roles=self.env.roles,
              step_envs=step_envs,
              map_resets=hosts.split_resets(map_all),
              threads=rollout.threads if jax.process_count() == 1 else 0,
              strict=rollout.max_failed == 0,
          ),
      )
    if give_up is not None:
      hosts.end_if(give_up)
    return episodes


def model_folder(config) -> str:
  """Returns the folder of the policy's weights."""
  return EMBEDDED_MODEL if config.model.folder == 'embedded' else config.model.folder


def sources(config) -> dict[str, str]:
  """Returns {setting: digest} of what settings name: plug-ins' files, and the models' folders."""
  found = plugins.digests(plugins.named(config))
  found['model.folder'] = hf_config.fingerprint(model_folder(config))
  if config.model.critic_folder:
    found['model.critic_folder'] = hf_config.fingerprint(config.model.critic_folder)
  return {path: digest for path, digest in found.items() if digest}


def load_policy(
    config, head: str = 'tokens', folder: str | None = None, shardings: Callable | None = None
) -> tuple[decoder.ModelConfig, dict]:
  """Loads (ModelConfig, parameters) from the config's folder, with the run's compute settings.

  Parameters are on the host, or laid out by `shardings` (tree of shapes -> tree of NamedShardings).
  """
  model = config.model
  shape, params = convert.load_hf(
      folder or model_folder(config), head=head, param_dtype=model.param_dtype, shardings=shardings
  )
  return _computed_as(shape, model), params


def load_shape(config, head: str = 'tokens', folder: str | None = None) -> decoder.ModelConfig:
  """Returns the ModelConfig that `load_policy` would give, without weights.

  A folder that does not exist may have the name of a preset: 'models/Qwen2.5-7B-Instruct' has the
  shape of 'qwen2.5-7b'.
  """
  model, folder = config.model, folder or model_folder(config)
  name = (
      os.path.basename(folder.rstrip('/')).lower().removesuffix('-instruct').removesuffix('-base')
  )
  if not os.path.isdir(folder) and name in layers.PRESETS:
    shape = dataclasses.replace(layers.PRESETS[name], head=head, param_dtype=model.param_dtype)
  elif not os.path.isdir(folder):
    raise UserError(
        f'{folder}: no such folder, and {name!r} is no known shape: give a folder with a '
        f'config.json, or a name that ends in one of {", ".join(layers.PRESETS)}'
    )
  else:
    shape = hf_config.load(folder, head=head, param_dtype=model.param_dtype)
  return _computed_as(shape, model)


def _computed_as(shape, model):
  return dataclasses.replace(
      shape,
      dtype=model.dtype,
      remat=model.remat,
      scan_layers=model.scan_layers,
      attention_chunk=model.attention_chunk,
      lora_scale=model.lora_alpha / (model.lora_rank or 1),
  )


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What an agent consists of besides its model."""

  tokenizer: chat.Tokenizer
  env: protocol.Kind  # with its retriever
  retriever: Any


def prepare(config) -> Prepared:
  """Loads tokenizer and retriever; checks that they fit the model, and that the retriever answers.

  Reads the model's config.json and no weights.
  """
  model = load_shape(config)
  _check_positions(config, model, 'model.folder')
  if config.model.critic_folder:
    critic = load_shape(config, 'value', config.model.critic_folder)
    _check_positions(config, critic, 'model.critic_folder')
    if critic.vocab_size != model.vocab_size:
      raise UserError(
          f'config.model.critic_folder={config.model.critic_folder!r} has a vocabulary of '
          f'{critic.vocab_size}, the policy has {model.vocab_size}: the critic reads the same '
          'tokens, give a model of the same family'
      )
  parts = seams.resolve(config)
  tokenizer = load_tokenizer(config, parts.env.frame)
  chat.check_matches(tokenizer, model.vocab_size)
  if config.model.critic_folder:
    _check_tokens(tokenizer, config.model.critic_folder)
  if config.model.role_parameters == 'own' and not parts.env.roles:
    raise UserError(
        f"config.model.role_parameters='own': {config.env.kind} has one agent and no roles: set it "
        "to 'shared'"
    )
  chat.make_framing(tokenizer, parts.env.frame, config.rollout.max_observation)  # or an error now
  retriever = make_retriever(config, parts)
  return Prepared(tokenizer, parts.bind(retriever), retriever)


# Arguments of transformers' apply_chat_template that are no variables of a template.
_OWN_ARGUMENTS = {
    'add_generation_prompt',
    'chat_template',
    'continue_final_message',
    'conversation',
    'max_length',
    'padding',
    'return_assistant_tokens_mask',
    'return_dict',
    'return_tensors',
    'tokenize',
    'tokenizer_kwargs',
    'tools',
    'truncation',
}


def load_tokenizer(config, frame: str = 'inline') -> chat.Tokenizer:
  """Returns the policy's tokenizer, with what the config gives to its chat template.

  The embedded model has its chat template only for an environment whose `frame` needs one: the
  gateway and environments with frame 'inline' give it texts as they are.
  """
  kwargs = config.model.chat_template_kwargs
  if wrong := _OWN_ARGUMENTS & kwargs.keys():
    raise UserError(
        f'config.model.chat_template_kwargs={dict(kwargs)}: {", ".join(sorted(wrong))} is set by '
        'the run: leave it out'
    )
  needs_template = config.model.folder == 'embedded' and frame != 'inline'
  template = EMBEDDED_TEMPLATE if needs_template else ''
  tokenizer = chat.load_tokenizer(model_folder(config), kwargs, template)
  if kwargs and tokenizer.render is None:
    raise UserError(
        f'config.model.chat_template_kwargs={dict(kwargs)}: the tokenizer in {tokenizer.folder!r} '
        'has no chat template: leave them out'
    )
  return tokenizer


def make_retriever(config, parts: seams.Seams) -> Any:
  """Returns the retriever, or None. UserError: it does not answer."""
  retriever = parts.make_retriever()
  check = getattr(retriever, 'check', None)
  if check is not None and config.retriever.max_failed_share < 1:  # with 1 no failure matters
    hosts.by_writer(check)
  return retriever


def _check_tokens(tokenizer, folder):
  """UserError unless ids mean the same to the critic in `folder`, where it has a tokenizer.

  Ids for which one of the two has no token may differ.
  """
  if not os.path.isfile(os.path.join(folder, 'tokenizer.json')):
    return
  pairs = enumerate(zip(tokenizer.token_bytes, chat.load_tokenizer(folder).token_bytes))
  wrong = next((i for i, (ours, theirs) in pairs if ours and theirs and ours != theirs), None)
  if wrong is not None:
    raise UserError(
        f'config.model.critic_folder={folder!r} has another tokenizer than the policy (id {wrong} '
        'differs): give a model of the same family'
    )


def check_prompts(config, prepared: Prepared, tasks: Sequence[types.Task]) -> None:
  """Encodes the prompts of some tasks. Warns where one is too long; UserError: all of them are."""
  num_long, lengths = hosts.by_writer(_prompt_lengths, config, prepared, tasks)
  if not num_long:
    return
  given = f'config.rollout.max_prompt={config.rollout.max_prompt}'
  if num_long == len(lengths):
    raise UserError(
        f'{given}: the prompts of all {num_long} questions looked at are longer, with '
        f'{min(lengths)} to {max(lengths)} tokens, and none could be played: raise '
        '--config.rollout.max_prompt and max_total'
    )
  logging.warning(
      '%d of %d prompts looked at are longer than %s allows, the longest has %d tokens: they are '
      'not played, and counted as env/prompt_too_long',
      num_long,
      len(lengths),
      given,
      max(lengths),
  )


_MOST_PROMPTS, _MOST_SECONDS = 1000, 10.0


def _prompt_lengths(config, prepared, tasks):
  """Returns (number of prompts that are too long, lengths) of tasks spread over the list."""
  longest = episode_loop.longest_prompt(limits(config))
  end, lengths, errors = time.monotonic() + _MOST_SECONDS, [], []
  for i in range(0, len(tasks), max(1, -(-len(tasks) // _MOST_PROMPTS))):
    task = tasks[i]
    seed = config.seed if task.seed is None else task.seed
    observation, info = protocol.reset(prepared.env(task, seed), seed)
    if error := info.get('environment_error'):
      errors.append(f'{error}, on task {task.id!r}, before its first turn')
    else:
      lengths.append(len(episode_loop.first_prompt(prepared.tokenizer, observation, info)))
    if errors and not config.rollout.max_failed:
      raise UserError(errors[0])
    if time.monotonic() > end:
      break
  if errors and not lengths:
    raise UserError(errors[0])
  return sum(not 0 < length <= longest for length in lengths), lengths


def _check_positions(config, model, field):
  if config.rollout.max_total > model.max_positions:
    raise UserError(
        f'config.rollout.max_total={config.rollout.max_total}: the model of config.{field} has '
        f'{model.max_positions} positions (max_position_embeddings): set max_total and the last of '
        'train.length_buckets to at most that'
    )


def limits(config) -> episode_loop.Limits:
  """Returns the limits of an episode."""
  rollout = config.rollout
  return episode_loop.Limits(
      max_prompt_tokens=rollout.max_prompt,
      max_turn_tokens=rollout.max_turn,
      max_observation_tokens=rollout.max_observation,
      max_total_tokens=rollout.max_total,
  )


def make_agent(
    config,
    model: decoder.ModelConfig,
    mesh: jax.sharding.Mesh | None = None,
    prepared: Prepared | None = None,
) -> Agent:
  """Builds the agent of a policy of shape `model`, on the devices of `mesh`; None: on the first."""
  prepared = prepared or prepare(config)
  tokenizer = prepared.tokenizer
  stop_table = chat.stop_automaton(tokenizer.token_bytes, prepared.env.stop_strings)
  num_roles = prepared.env.num_roles
  sampler = make_sampler(config, model, stop_table, tokenizer.eos_ids, mesh, num_roles)
  in_whole_groups = sampling.round_up(config.eval.rows, sampler.width)
  own = config.model.role_parameters == 'own'
  return Agent(
      config=config,
      tokenizer=tokenizer,
      model=model,
      env=prepared.env,
      retriever=prepared.retriever,
      sampler=sampler,
      greedy=sampler.greedy((in_whole_groups if own else config.eval.rows) * num_roles),
  )


def make_sampler(
    config,
    model: decoder.ModelConfig,
    stop_table: np.ndarray,
    eos_ids: Sequence[int],
    mesh: jax.sharding.Mesh | None = None,
    num_roles: int = 1,  # rows per episode
) -> sampler_lib.Sampler:
  """Returns the sampler of training, in the sampling layout over the devices of `mesh`.

  Roles with parameters of their own have groups of their own, as many each. Rows that are not
  split can be moved: only those with something to prefill are computed. On a CPU
  their keys lie in tiles; keys of split rows do not, because reading from tiles goes row by row.
  """
  rollout, rows = config.rollout, row_sharding(config, model, mesh)
  platform = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform
  tiled = platform == 'cpu' and rows is None
  model = dataclasses.replace(
      model, row_sharding=rows, cache_tile=decoder.CPU_CACHE_TILE if tiled else 0
  )
  buckets = rollout.slot_buckets or sampling.default_slot_buckets(rollout.max_total, platform)
  num_rows = num_roles * (rollout.rows or config.train.episodes)
  width = rollout.width
  if config.model.role_parameters == 'own':
    width = min(width or num_rows, num_rows // num_roles)
    num_rows = num_roles * sampling.round_up(-(-num_rows // num_roles), width)
  sizes = sampling.Sizes(
      rollout.max_total,
      rows=num_rows,
      width=width,
      slot_buckets=buckets,
      chunk_buckets=rollout.chunks,
  )
  distribution = sampling.Distribution(rollout.temperature, rollout.top_k, rollout.top_p)
  records_routes = rollout.routing_replay == 'sampling' and model.num_experts > 0
  return sampler_lib.Sampler(model, stop_table, eos_ids, sizes, distribution, rows, records_routes)


def row_sharding(
    config, model: decoder.ModelConfig, mesh: jax.sharding.Mesh | None
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of the sampler's rows over the devices of `mesh`; None: one device."""
  if mesh is None or mesh.size == 1:
    return None
  return sharding.rows(layout.make_mesh(mesh, model, config.rollout.mesh))


def load_tasks(config, split: str) -> list[types.Task]:
  """Returns the questions of a split, of the data sets that the config names."""
  return seams.resolve(config).load_tasks(split)
