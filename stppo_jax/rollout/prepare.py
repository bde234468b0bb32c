"""Loads the models and the tokenizer that a config names, and checks that they fit together.

The checks run before any weights are loaded, so that a mistake costs seconds.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import os
import pathlib
import re
import time

from absl import logging

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import guard as guard_lib
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.models import decoder
from stppo_jax.models import hf_config
from stppo_jax.models import hf_weights
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import tokenizer as tokenizer_lib
from stppo_jax.types import UserError

_ASSETS = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'assets')
EMBEDDED_MODEL = os.path.join(_ASSETS, 'tiny')
EMBEDDED_TEMPLATE = os.path.join(_ASSETS, 'tiny_chat_template.jinja')

# `check_prompts` looks at this many prompts, for at most this time.
_MAX_PROMPTS = 1000
_MAX_SECONDS = 10.0
_WORD = re.compile(r'[^\W\d_]{2,}')
_MOST_UNKNOWN = 0.1  # share of the words in prompts that the embedded model may not know

# The run passes these arguments of transformers' apply_chat_template itself.
_RESERVED_ARGUMENTS = frozenset(
    'add_generation_prompt chat_template continue_final_message conversation max_length padding '
    'return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools '
    'truncation'.split()
)


def model_folder(config) -> str:
  """Returns the folder of the policy's weights."""
  return EMBEDDED_MODEL if config.model.folder == 'embedded' else config.model.folder


def load_policy(
    config,
    head: str = 'tokens',
    folder: str | None = None,
    shardings: Callable | None = None,
    value_labels: tuple[str, ...] = ('value',),
) -> tuple[decoder.ModelConfig, dict]:
  """Loads (ModelConfig, parameters) from the config's folder, with the run's compute settings.

  Parameters are on the host, or laid out by `shardings` (tree of shapes -> tree of NamedShardings).
  A value head has the outputs `value_labels`, see `Variant.value_labels`.
  """
  folder = folder or model_folder(config)
  hf_config.check_is_model(folder)
  dtype = config.model.param_dtype
  shape, params = hf_weights.load_hf(
      folder, head=head, param_dtype=dtype, shardings=shardings, value_labels=value_labels
  )
  return _with_compute_settings(shape, config.model), params


def load_shape(
    config,
    head: str = 'tokens',
    folder: str | None = None,
    value_labels: tuple[str, ...] = ('value',),
) -> decoder.ModelConfig:
  """Returns the ModelConfig that `load_policy` would give, without weights.

  A folder that does not exist may have the name of a preset: 'models/Qwen2.5-7B-Instruct' has the
  shape of 'qwen2.5-7b'.
  """
  folder = folder or model_folder(config)
  hf_config.check_is_model(folder)
  dtype = config.model.param_dtype
  if os.path.isdir(folder):
    shape = hf_config.load(folder, head=head, param_dtype=dtype, value_labels=value_labels)
  else:
    from stppo_jax.models import presets

    preset = presets.find(folder)
    shape = dataclasses.replace(preset, head=head, param_dtype=dtype, value_labels=value_labels)
  return _with_compute_settings(shape, config.model)


def _with_compute_settings(shape, model):
  return dataclasses.replace(
      shape,
      dtype=model.dtype,
      remat=model.remat,
      scan_layers=model.scan_layers,
      attention_chunk=model.attention_chunk,
      lora_scale=model.lora_alpha / (model.lora_rank or 1),
  )


def load_tokenizer(config, frame: str = 'inline') -> tokenizer_lib.Tokenizer:
  """Returns the policy's tokenizer, with the config's arguments for its chat template.

  The embedded model has its chat template only for an environment whose `frame` needs one. The
  gateway and environments with frame 'inline' give it plain texts.
  """
  kwargs = config.model.chat_template_kwargs
  setting = f'config.model.chat_template_kwargs={dict(kwargs)}'
  if reserved := _RESERVED_ARGUMENTS & kwargs.keys():
    raise UserError(f'{setting}: {", ".join(sorted(reserved))} is set by the run: leave it out')
  needs_template = config.model.folder == 'embedded' and frame != 'inline'
  template = EMBEDDED_TEMPLATE if needs_template else ''
  tokenizer = tokenizer_lib.load_tokenizer(model_folder(config), kwargs, template)
  if kwargs and tokenizer.render is None:
    raise UserError(
        f'{setting}: the tokenizer in {tokenizer.folder!r} has no chat template: leave them out'
    )
  return tokenizer


def limits(config) -> episode_lib.EpisodeLimits:
  """Returns the limits of an episode."""
  rollout = config.rollout
  return episode_lib.EpisodeLimits(
      max_prompt_tokens=rollout.max_prompt,
      max_turn_tokens=rollout.max_turn,
      max_observation_tokens=rollout.max_observation,
      max_total_tokens=rollout.max_total,
  )


def make_guard(config, stop_signal: StopSignal = NEVER) -> guard_lib.Guard:
  """Returns the guard of the calls of environments, which leaves them at the signal."""
  rollout = config.rollout
  if hosts.num_processes() == 1:
    return guard_lib.Guard(rollout.env_timeout_s, stop_signal, in_place=rollout.threads == 0)
  # All processes have to raise Stopped together, after the calls of this turn.
  return guard_lib.Guard(rollout.env_timeout_s, hosts.anywhere(stop_signal), raises=False)


def check_tokenizer(config, tokenizer: tokenizer_lib.Tokenizer, frame: str) -> None:
  """Raises a UserError if the policy, its critic or the frame of observations do not fit."""
  model = load_shape(config)
  tokenizer_lib.check_matches(tokenizer, model.vocab_size)
  if config.model.critic_folder:
    _check_critic(config, model, tokenizer)
  # A tokenizer that cannot frame observations is an error now.
  tokenizer_lib.make_framing(tokenizer, frame, config.rollout.max_observation)


def check_weights(
    config, head: str, folder: str | None = None, value_labels: tuple[str, ...] = ('value',)
) -> None:
  """Raises the UserErrors that `load_policy` would raise with these arguments. Reads headers."""
  shape = load_shape(config, head, folder, value_labels)
  hf_weights.check(folder or model_folder(config), shape)


def check_positions(config) -> None:
  """Raises a UserError if the policy has too few positions for config.rollout.max_total."""
  _check_positions(config, load_shape(config), 'model.folder')


def _check_positions(config, model, field):
  if config.rollout.max_total > model.max_positions:
    raise UserError(
        f'config.rollout.max_total={config.rollout.max_total}: the model of config.{field} has '
        f'{model.max_positions} positions (config.json): set max_total and the last of '
        'train.length_buckets to at most that'
    )


def _check_critic(config, policy, tokenizer):
  """Checks that the critic can read the policy's tokens.

  Ids for which only one of the two tokenizers has a token may differ.
  """
  folder = config.model.critic_folder
  setting = f'config.model.critic_folder={folder!r}'
  critic = load_shape(config, 'value', folder)
  _check_positions(config, critic, 'model.critic_folder')
  if critic.vocab_size != policy.vocab_size:
    raise UserError(
        f'{setting} has a vocabulary of {critic.vocab_size}, the policy has {policy.vocab_size}: '
        'the critic reads the same tokens, give a model of the same family'
    )
  if os.path.isfile(os.path.join(folder, 'tokenizer.json')):
    _check_same_tokens(setting, folder, tokenizer)


def check_teacher(config, tokenizer: tokenizer_lib.Tokenizer) -> None:
  """Raises a UserError if the teacher in config.teacher.folder cannot score the policy's tokens.

  Its vocabulary may have other padding than the policy's.
  """
  folder = config.teacher.folder
  model = load_shape(config, folder=folder)
  _check_positions(config, model, 'teacher.folder')
  tokenizer_lib.check_matches(tokenizer, model.vocab_size)
  hf_config.check_has_tokenizer(pathlib.Path(folder))
  _check_same_tokens(f'config.teacher.folder={folder!r}', folder, tokenizer)


def _check_same_tokens(setting, folder, tokenizer):
  """Raises a UserError if an id stands for another token in the folder than for the policy."""
  other_bytes = tokenizer_lib.load_tokenizer(folder).token_bytes
  for i, (policy_token, other_token) in enumerate(zip(tokenizer.token_bytes, other_bytes)):
    if policy_token and other_token and policy_token != other_token:
      raise UserError(
          f'{setting} has another tokenizer than the policy (id {i} differs): give a model of the '
          'same family'
      )


def check_prompts(
    config, env: factory.EnvFactory, tokenizer: tokenizer_lib.Tokenizer, tasks: Sequence[types.Task]
) -> None:
  """Encodes the prompts of some tasks and logs how many are too long. UserError: all of them.

  Logs how many of their words the embedded model does not know. An agent program writes its own
  prompts, which `rollout.max_total` limits.
  """
  if env.is_program:
    return
  lengths, words = hosts.by_writer(_look_at_prompts, config, env, tokenizer, tasks)
  if config.model.folder == 'embedded':
    _warn_of_unknown_words(tokenizer, words)
  longest = episode_lib.longest_prompt(limits(config))
  num_long = sum(not 0 < length <= longest for length in lengths)
  if not num_long:
    return
  setting = f'config.rollout.max_prompt={config.rollout.max_prompt}'
  if num_long == len(lengths):
    raise UserError(
        f'{setting}: the prompts of all {num_long} questions looked at are longer, with '
        f'{min(lengths)} to {max(lengths)} tokens, and none could be played: raise '
        '--config.rollout.max_prompt and max_total'
    )
  logging.warning(
      '%d of %d prompts looked at are longer than %s allows, the longest has %d tokens: they are '
      'not played, and counted as env/prompt_too_long',
      num_long,
      len(lengths),
      setting,
      max(lengths),
  )


def _warn_of_unknown_words(tokenizer, words):
  """Logs the words that the embedded model has no token for: it was trained on whole words."""
  unknown = []
  for word in words:
    num_tokens = min(len(tokenizer.encode(text)) for text in (word, f' {word}'))
    if num_tokens > 1:
      unknown.append(word)
  if len(unknown) > _MOST_UNKNOWN * len(words):
    logging.warning(
        'the embedded model does not know %d of the %d words in the prompts and answers looked at '
        '(%s): it knows those of its own passages. Real texts need a language model, '
        '--config.model.folder=FOLDER',
        len(unknown),
        len(words),
        ', '.join(unknown[:5]),
    )


def _look_at_prompts(config, env, tokenizer, tasks):
  """Returns the lengths of the prompts of tasks spread over the list, and the words in them."""
  end = time.monotonic() + _MAX_SECONDS
  guard = make_guard(config)
  stride = -(-len(tasks) // _MAX_PROMPTS) or 1
  lengths = []
  errors = []
  words: dict[str, None] = {}
  for task in tasks[::stride]:
    seed = config.seed if task.seed is None else task.seed
    observation, info = stepping.reset(env(task, seed, guard), seed)
    if error := info.get('environment_error'):
      errors.append(f'{error}, on task {task.id!r}, before its first turn')
    else:
      lengths.append(len(episode_lib.first_prompt(tokenizer, observation, info)))
      texts = (protocol.full_text(observation, info), *task.answers)
      words |= dict.fromkeys(_WORD.findall(' '.join(texts)))
    if time.monotonic() > end:
      break
  if errors and not (lengths and config.rollout.max_failed):
    raise UserError(errors[0])
  return lengths, list(words)
