"""Plays many environments at once: tasks in, Episodes out.

Turns are sampled by a `sequences.Play`. Turns that end together step their environments together,
so that one retriever call serves all of them. An agent's turn is decoded for the environment, but
the episode and the model's context keep the sampled ids. Each role of an environment has a row and
its own context, and reads only what the environment gives to it.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import time
import zlib

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import factory
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.rollout import engine
from stppo_jax.rollout import sequences
from stppo_jax.text import tokenizer as tokenizer_lib

_OVER = sequences.Prompt(ids=(), budget=0)
# Random streams that are folded into a sequence's key. Its tokens fold in their positions.
_SEED_STREAM = np.uint32(2**32 - 1)
_ROLE_STREAM = np.uint32(2**31)  # plus the number of a role, for all roles but the first


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """Limits of an episode, in tokens. The defaults are Search-R1's."""

  max_prompt_tokens: int = 2048  # a longer prompt is not played: truncated, failed, counted
  max_turn_tokens: int = 500  # a longer turn is cut, and reaches the environment without its tag
  max_observation_tokens: int = 500  # a longer observation is cut, except for its closing tag
  max_total_tokens: int = 4096  # prompt, turns and observations
  min_turn_tokens: int = 8  # an observation that leaves less room than this ends the episode


@dataclasses.dataclass(frozen=True)
class EpisodeInputs:
  """What is played: one entry per episode, in the same order."""

  envs: Sequence[protocol.Env]  # one per task
  tasks: Sequence[types.Task]
  groups: Sequence[int]
  keys: jax.Array  # [episodes] random keys, see `row_keys`


@dataclasses.dataclass(frozen=True)
class EpisodeRules:
  """How episodes are played."""

  env: factory.EnvFactory  # its frames, roles, ends of turns and core metrics count here
  limits: EpisodeLimits
  step_envs: stepping.StepEnvs = stepping.step_all
  map_resets: Callable[..., Iterable] = map  # one by one, or that of a pool of threads
  threads: int = 0  # calls of `step_envs` at once, for different environments
  strict: bool = False  # raise a UserError where the code of an environment raises


def play(
    sampler: sequences.PolicySampler,
    params: object,
    tokenizer: tokenizer_lib.Tokenizer,
    inputs: EpisodeInputs,
    rules: EpisodeRules,
    run: sequences.Play = engine.run,
) -> tuple[list[types.Episode], sequences.Report]:
  """Returns one episode per environment and role, in the same order, and a report of the work.

  `run` plays the sequences with the sampler.

  An episode depends on its environment, key and prompt, and not on the other episodes or the
  speed of any environment. With threads, environments have to lock what they share.
  """
  started = time.perf_counter()
  framings = {}
  for frame in rules.env.frames:
    framings[frame] = tokenizer_lib.make_framing(
        tokenizer, frame, rules.limits.max_observation_tokens
    )
  num_roles = rules.env.rows_per_episode
  states: list[EpisodeState] = []
  episodes: list[types.Episode] = []
  prompts: list[sequences.Prompt] = []  # one per environment and role
  seeds = reset_seeds(inputs.keys, inputs.tasks)
  resets = rules.map_resets(stepping.reset, inputs.envs, seeds)
  for task, group, reset in zip(inputs.tasks, inputs.groups, resets, strict=True):
    framing = framings[rules.env.of(task).frame]
    state = EpisodeState(task, framing, rules, group, len(states))
    prompt = state.observe(*reset)
    states.append(state)
    episodes += state.episodes
    prompts += [_OVER] * num_roles
    prompts[state.sequence] = prompt
  hosts.require_same(
      'prompts of the environments',
      [zlib.crc32(episode.prompt.tobytes()) for episode in episodes],
      'let `reset` depend on its seed and the task alone',
  )
  reset_s = time.perf_counter() - started

  def respond(completions: list[sequences.TurnCompletion]) -> list[sequences.Prompt]:
    numbers = [completion.index // num_roles for completion in completions]
    texts = [states[i].action_text(turn.turn.tokens) for i, turn in zip(numbers, completions)]
    envs = [inputs.envs[i] for i in numbers]
    outcomes = rules.step_envs(envs, texts)
    prompts = []
    for i, completion, outcome in zip(numbers, completions, outcomes):
      prompts.append(states[i].record(completion.turn, outcome))
    return prompts

  keys = inputs.keys
  if num_roles > 1:
    keys = role_keys(keys, num_roles)
  report = run(sampler, params, prompts, keys, respond, rules.threads)
  report.seconds['env'] += reset_s
  return episodes, report


def row_keys(key: jax.Array, tasks: Sequence[types.Task]) -> jax.Array:
  """Returns a key per row that depends on `key`, its task's id and how often that came before."""
  num_samples: collections.Counter[str] = collections.Counter()
  folded = np.zeros((2, len(tasks)), np.uint32)
  for i, task in enumerate(tasks):
    task_hash = zlib.crc32(task.id.encode('utf-8'))
    folded[:, i] = task_hash, num_samples[task.id]
    num_samples[task.id] += 1
  return _fold_rows(key, *folded)


@jax.jit  # one program: a run waits while each operation compiles
def _fold_rows(key: jax.Array, task_hashes: jax.Array, samples: jax.Array) -> jax.Array:
  def fold(task_hash, sample):
    task_key = jax.random.fold_in(key, task_hash)
    return jax.random.fold_in(task_key, sample)

  return jax.vmap(fold)(task_hashes, samples)


def role_keys(keys: jax.Array, num_roles: int) -> jax.Array:
  """Returns a key per environment and role [B,R] from keys [B], which are the first role's."""
  columns = [keys]
  for role in range(1, num_roles):
    stream = _ROLE_STREAM + np.uint32(role)
    fold = functools.partial(jax.random.fold_in, data=stream)
    columns.append(jax.vmap(fold)(keys))
  return jnp.stack(columns, axis=1)


def episode_seeds(keys: jax.Array) -> list[int]:
  """Returns 31 bits per episode for `Env.reset`, from keys [B]; sampling uses none of them."""
  seeds = np.asarray(_draw_seeds(keys)) >> 1
  return seeds.tolist()


@jax.jit
def _draw_seeds(keys: jax.Array) -> jax.Array:
  def draw(key):
    seed_key = jax.random.fold_in(key, _SEED_STREAM)
    return jax.random.bits(seed_key)

  return jax.vmap(draw)(keys)


def reset_seeds(keys: jax.Array, tasks: Sequence[types.Task]) -> list[int]:
  """Returns the seed of each environment. Samples of a task with a seed play the same instance."""
  seeds = episode_seeds(keys)
  for i, task in enumerate(tasks):
    if task.seed is not None:
      seeds[i] = task.seed
  return seeds


def first_prompt(
    tokenizer: tokenizer_lib.Tokenizer, observation: str, info: protocol.ResetInfo
) -> list[int]:
  """Returns the prompt of what `Env.reset` gave, with its tools if it has some."""
  message = protocol.full_text(observation, info)
  tools = info.get('tools', ())
  declaration = info.get('declaration', '')
  return tokenizer_lib.encode_prompt(tokenizer, message, tools, declaration)


def longest_prompt(limits: EpisodeLimits) -> int:
  """Returns the tokens of the longest prompt that is played."""
  return min(limits.max_prompt_tokens, limits.max_total_tokens - _least_turn(limits))


class EpisodeState:
  """An environment in progress: the episodes of its roles so far."""

  def __init__(
      self,
      task: types.Task,
      framing: tokenizer_lib.Framing,
      rules: EpisodeRules,
      group: int,
      number: int,  # position of the environment in its batch
  ):
    self.active_role = 0  # number of the role that moves next
    self._framing = framing
    self._limits = rules.limits
    self._strict = rules.strict
    env = rules.env.of(task)
    self._first_state = rules.env.first_state(task)
    self._skips_thoughts = env.skips_thoughts
    self._stop_strings = env.stop_strings
    self._budget = 0  # most tokens of the turn that follows
    self._num_cut: collections.Counter[str] = collections.Counter()  # turns by role
    self._lengths: dict[str, int] = {}  # tokens of a role's context before its next turn
    self._roles = env.roles or ('',)
    self._number = number
    # The samples of a question are compared per role: each role of a group has its own group.
    self.episodes = [
        types.Episode(
            task=task,
            group=group * len(self._roles) + r,
            prompt=np.zeros((0,), np.int32),
            turns=[],
            core_metrics=env.core_metrics,
            role=role,
            number=number if role else None,
        )
        for r, role in enumerate(self._roles)
    ]

  @property
  def sequence(self) -> int:
    """Number of the engine's sequence that continues."""
    return self._number * len(self._roles) + self.active_role

  @property
  def opening(self) -> str:
    """The tag with which the active role's prompt has opened a thought; '': it has not."""
    episode = self.episodes[self.active_role]
    before = episode.turns[-1].observation if episode.turns else episode.prompt
    return self._framing.tokenizer.opening(before)

  def action_text(self, tokens: np.ndarray) -> str:
    """Returns a turn of the active role as its environment reads it: with `opening`."""
    return self.opening + action_text(self._framing.tokenizer, tokens)

  def observe(self, observation: str, info: Mapping[str, object]) -> sequences.Prompt:
    """Gives an observation to the role that moves next; returns its prompt.

    An observation that does not fit ends the episode.
    """
    if 'environment_error' in info:
      self._fail(info, 'before its first turn')
      return self.end(truncated=False)
    if self._roles != ('',):
      self.active_role = self._named_role(info)
    prompt = self._read(self.episodes[self.active_role], observation, info)
    return prompt or self.end(truncated=True)

  def record(self, turn: types.Turn, outcome: protocol.Step) -> sequences.Prompt:
    """Adds a turn of the active role and its outcome; returns the prompt of the next turn."""
    observation, reward, terminated, truncated, info = outcome
    is_cut = self._is_cut(turn)
    active = self.episodes[self.active_role]
    self._num_cut[active.role] += is_cut
    self._add_turn(active, turn, reward, info)
    for episode in self.episodes:
      self._add_outcome(episode, info)
    if 'environment_error' in info:
      num_turns = sum(len(episode.turns) for episode in self.episodes)
      self._fail(info, f'in turn {num_turns}')
    if terminated or truncated:
      return self.end(bool(truncated) or is_cut)
    return self.observe(observation, info)

  def _is_cut(self, turn):
    """Returns whether a turn ended at its limit, without a token or a string that ends a turn."""
    if len(turn.tokens) < self._budget or turn.tokens[-1] in self._framing.tokenizer.eos_ids:
      return False
    text = self._framing.tokenizer.decode(turn.tokens)
    before = self._framing.tokenizer.decode(turn.tokens[:-1])
    return not any(text.count(stop) > before.count(stop) for stop in self._stop_strings)

  def _named_role(self, info):
    """Returns the number of the role that `info` names. UserError: it names none of them."""
    role = info.get('role')
    if role not in self._roles:
      raise types.UserError(
          f"the environment gave info['role'] = {role!r} for the one that moves next: its roles "
          f'are {", ".join(self._roles)}'
      )
    return self._roles.index(role)

  def _read(self, episode, observation, info):
    """Adds the prompt, or the observation after the last turn; None where it is too long."""
    limits = self._limits
    if not episode.turns:
      ids = first_prompt(self._framing.tokenizer, observation, info)
      longest = max(longest_prompt(limits), 0)
      fits = 0 < len(ids) <= longest
      episode.prompt = np.array(ids[:longest], np.int32)
      episode.failed = not fits
      episode.counts['prompt_too_long'] = float(not fits)
      return self._prompt(episode, ids, len(ids)) if fits else None
    text = protocol.full_text(observation, info)
    turn = episode.turns[-1]
    ids = self._framing.encode(text, turn.tokens)
    length = self._lengths[episode.role] + len(turn.tokens) + len(ids)
    if length + _least_turn(limits) > limits.max_total_tokens:
      return None
    turn.observation = np.array(ids, np.int32)
    return self._prompt(episode, ids, length)

  def _prompt(self, episode, ids, length):
    """Returns `ids` to prefill, with the next turn's budget in a context of `length` with them."""
    self._lengths[episode.role] = length
    limits = self._limits
    room = limits.max_total_tokens - length
    budget = min(limits.max_turn_tokens, room)
    self._budget = budget
    stop_state = self._first_state
    if self._skips_thoughts and self._framing.tokenizer.opening(ids):
      stop_state += tokenizer_lib.THOUGHT_STATE
    return sequences.Prompt(ids, budget, self.sequence, stop_state)

  def _fail(self, info, when):
    """Masks the episodes of an environment whose code raised, or took too long.

    Logs the first traceback of the errors, and every call that took too long.
    """
    task = self.episodes[0].task
    error = f'{info["environment_error"]}, on task {task.id!r}, {when}'
    if self._strict and not info.get('given_up'):
      raise types.UserError(error)
    if info.get('timed_out'):
      logging.warning('%s. Its episode is not trained on\n%s', error, info['traceback'])
    else:
      logging.log_first_n(
          logging.WARNING,
          '%s. Episodes like this one are not trained on, and env/environment_failed counts them'
          '\n%s',
          1,
          error,
          info['traceback'],
      )
    for episode in self.episodes:
      episode.failed = True
      episode.error = error

  def end(self, truncated: bool) -> sequences.Prompt:
    """Ends the episode of each role; returns the prompt of a sequence that is over."""
    tokenizer = self._framing.tokenizer
    for episode in self.episodes:
      episode.truncated = truncated
      episode.counts |= count_turns(episode.turns, tokenizer)
      episode.counts['cut'] = float(self._num_cut[episode.role])
    return _OVER

  def _add_turn(self, episode, turn, reward, info):
    turn.action = str(info.get('action') or 'other')  # a GEM environment names none
    turn.reward = finite('reward', reward)
    episode.turns.append(turn)

  def _add_outcome(self, episode, info):
    """Adds failure, metrics and further rewards of a step to the episode of a role."""
    episode.failed |= bool(info.get('retrieval_failed', False))
    metrics = dict(info.get('metrics') or {})
    if len(self._roles) > 1:
      role_metrics = self._by_role(info, 'role_metrics')
      rewards = self._by_role(info, 'rewards')
      metrics |= role_metrics.get(episode.role, {})
      self._add_reward(episode, rewards.get(episode.role, 0.0))
    for name, value in metrics.items():
      episode.metrics[name] = finite(f"info['metrics'][{name!r}]", value)

  def _by_role(self, info, key):
    """Returns info[key]. UserError: it has another role than those of the environment."""
    by_role = info.get(key) or {}
    if unknown := by_role.keys() - set(self._roles):
      raise types.UserError(
          f'the environment gave rewards or metrics of {unknown.pop()!r}: its roles are '
          f'{", ".join(self._roles)}'
      )
    return by_role

  def _add_reward(self, episode, reward):
    if episode.turns:
      episode.turns[-1].reward += finite(f"info['rewards'][{episode.role!r}]", reward)
    elif reward:
      logging.log_first_n(
          logging.WARNING,
          'a reward of the role %s before its first turn counts nowhere',
          1,
          episode.role,
      )


def _least_turn(limits: EpisodeLimits) -> int:
  return min(limits.min_turn_tokens, limits.max_turn_tokens)


def action_text(tokenizer: tokenizer_lib.Tokenizer, tokens: np.ndarray) -> str:
  """Returns the turn's text for the environment, without the eos token that may end it."""
  if tokens[-1] in tokenizer.eos_ids:
    tokens = tokens[:-1]
  return tokenizer.decode(tokens)


def count_turns(
    turns: Sequence[types.Turn], tokenizer: tokenizer_lib.Tokenizer
) -> dict[str, float]:
  """Returns the numbers of turns that are invalid, repeated or empty."""
  invalid = [turn for turn in turns if turn.action == 'invalid']
  different = {turn.tokens.tobytes() for turn in turns}
  texts = [action_text(tokenizer, turn.tokens).strip() for turn in turns]
  return {
      'invalid': float(len(invalid)),
      'repeated': float(len(turns) - len(different)),
      'empty': float(texts.count('')),
  }


def finite(name: str, value) -> float:
  """Returns a number of the environment as a float. UserError: it is not finite."""
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    raise types.UserError(f'the environment gave {name} = {value!r}: a finite number is needed')
  return number
