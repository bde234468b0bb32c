"""Plays many environments at once: tasks in, Episodes out.

The engine schedules prefill and decode. Turns that end together step their environments together,
so that one retriever call serves all of them. An agent's turn is decoded for the environment, but
the episode and the model's context keep the sampled ids. Each role of an environment has a context
of its own, and reads only what the environment gives to it.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import time
from typing import Any
import zlib

from absl import logging
import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib

_OVER = engine.Prompt(ids=(), budget=0)
_SEED_STREAM = np.uint32(2**32 - 1)  # folded into a row's key; its tokens fold in their positions
_ROLE_STREAM = np.uint32(2**31)  # and the number of a role: into the keys of all but the first


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of an episode, in tokens. The defaults are Search-R1's."""

  max_prompt_tokens: int = 2048  # a longer prompt is not played: truncated, failed, counted
  max_turn_tokens: int = 500  # a longer turn is cut, and reaches the environment without its tag
  max_observation_tokens: int = 500  # a longer observation is cut, except for its closing tag
  max_total_tokens: int = 4096  # prompt, turns and observations
  min_turn_tokens: int = 8  # an observation that leaves less room than this ends the episode

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise types.UserError(f'{field.name}={getattr(self, field.name)}: give 1 or more')


@dataclasses.dataclass(frozen=True)
class Rows:
  """What is played: an entry per episode, in their order."""

  envs: Sequence[protocol.Env]  # each made for its task
  tasks: Sequence[types.Task]
  groups: Sequence[int]
  keys: jax.Array  # [episodes] random keys, see `row_keys`
  seeds: Sequence[int] | None = None  # given to `reset`; None: `episode_seeds(keys)`

  def __post_init__(self):
    chex.assert_equal(len(self.envs), len(self.tasks))
    chex.assert_equal(len(self.envs), len(self.groups))


@dataclasses.dataclass(frozen=True)
class Rules:
  """How episodes are played."""

  limits: Limits
  frame: str = 'inline'  # of observations, see `protocol`
  core_metrics: Sequence[str] = ()  # of the environments, see `protocol`
  roles: Sequence[str] = ()  # of the environments, see `protocol`
  step_envs: stepping.StepEnvs = stepping.step_all
  map_resets: Callable[..., Iterable] = map  # one by one, or that of a pool of threads
  threads: int = 0  # calls of `step_envs` at once, for different environments
  strict: bool = False  # raise a UserError where the code of an environment raises


def play(
    sampler: sampler_lib.Sampler, params, tokenizer: chat.Tokenizer, rows: Rows, rules: Rules
) -> tuple[list[types.Episode], engine.Report]:
  """Returns one episode per environment and role, in their order, and a report of the work.

  An episode depends on its environment, key and prompt alone, and not on the other episodes or the
  speed of any environment. With threads, environments have to lock what they share. A task's own
  seed takes precedence over `seeds`.
  """
  envs, limits = rows.envs, rules.limits
  if limits.max_total_tokens > sampler.max_slots:
    raise types.UserError(
        f'max_total_tokens={limits.max_total_tokens} but the sampler was built for '
        f'max_slots={sampler.max_slots}: build it for at least as many'
    )
  started = time.perf_counter()
  framing = chat.make_framing(tokenizer, rules.frame, limits.max_observation_tokens)
  num_roles = max(1, len(rules.roles))
  tables: list[Table] = []
  prompts: list[engine.Prompt] = []
  seeds = [
      seed if task.seed is None else task.seed
      for task, seed in zip(rows.tasks, rows.seeds or episode_seeds(rows.keys))
  ]
  openings = rules.map_resets(stepping.reset, envs, seeds)
  for i, (task, group, opening) in enumerate(zip(rows.tasks, rows.groups, openings)):
    table = Table(seats(task, group, i, rules), framing, limits, rules.strict)
    mover, prompt = table.give(*opening)
    tables.append(table)
    prompts += [prompt if r == mover else _OVER for r in range(num_roles)]
  episodes = [episode for table in tables for episode in table.episodes]
  hosts.require_same(
      'prompts of the environments',
      [zlib.crc32(episode.prompt.tobytes()) for episode in episodes],
      'let `reset` depend on its seed and the task alone',
  )
  reset_s = time.perf_counter() - started

  def respond(turns: list[engine.Completion]) -> list[engine.Prompt]:
    actions = [action_text(tokenizer, turn.tokens) for turn in turns]
    places = [divmod(turn.index, num_roles) for turn in turns]
    outcomes = rules.step_envs([envs[i] for i, _ in places], actions)
    following = []
    for (i, role), turn, outcome in zip(places, turns, outcomes):
      mover, prompt = tables[i].record(role, turn, outcome)
      following.append(dataclasses.replace(prompt, sequence=i * num_roles + mover))
    return following

  keys = rows.keys if num_roles == 1 else role_keys(rows.keys, num_roles)
  report = engine.run(sampler, params, prompts, keys, respond, rules.threads)
  report.seconds['env'] += reset_s
  return episodes, report


def row_keys(key: jax.Array, tasks: Sequence[types.Task]) -> jax.Array:
  """Returns a key per row that depends on `key`, its task's id and how often that came before."""
  seen: collections.Counter[str] = collections.Counter()
  samples = np.zeros((len(tasks),), np.uint32)
  for i, task in enumerate(tasks):
    samples[i] = seen[task.id]
    seen[task.id] += 1
  ids = np.array([zlib.crc32(task.id.encode('utf-8')) for task in tasks], np.uint32)

  def fold(task_id, sample):
    return jax.random.fold_in(jax.random.fold_in(key, task_id), sample)

  return jax.vmap(fold)(ids, samples)


def role_keys(keys: jax.Array, num_roles: int) -> jax.Array:
  """Returns a key per environment and role [B,R] from keys [B], which are the first role's."""
  streams = _ROLE_STREAM + np.arange(1, num_roles, dtype=np.uint32)
  of_others = [jax.vmap(lambda key, s=s: jax.random.fold_in(key, s))(keys) for s in streams]
  return jnp.stack([keys, *of_others], axis=1)


def episode_seeds(keys: jax.Array) -> list[int]:
  """Returns 31 bits per episode for `Env.reset`, from keys [B]; sampling uses none of them."""
  bits = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, _SEED_STREAM)))(keys)
  return (np.asarray(bits) >> 1).tolist()


def first_prompt(tokenizer: chat.Tokenizer, observation: str, info: dict) -> list[int]:
  """Returns the prompt of what `Env.reset` gave, with its tools if it has some."""
  message = protocol.full_text(observation, info)
  return chat.encode_prompt(tokenizer, message, info.get('tools', ()), info.get('declaration', ''))


def longest_prompt(limits: Limits) -> int:
  """Returns the tokens of the longest prompt that is played."""
  return min(limits.max_prompt_tokens, limits.max_total_tokens - _least_turn(limits))


def seats(task: types.Task, group: int, number: int, rules: Rules) -> list[types.Episode]:
  """Returns the episode of each role, in which nothing has happened yet.

  The samples of a question are compared per role: each role of a group is a group of its own.
  """
  counts = ('invalid', 'repeated', 'empty', 'cut', 'prompt_too_long')
  roles = tuple(rules.roles) or ('',)
  return [
      types.Episode(
          task=task,
          group=group * len(roles) + r,
          prompt=np.zeros((0,), np.int32),
          turns=[],
          counts=dict.fromkeys(counts, 0.0),
          core_metrics=tuple(rules.core_metrics),
          role=role,
          number=number if role else None,
      )
      for r, role in enumerate(roles)
  ]


@dataclasses.dataclass(frozen=True)
class Table:
  """An environment in progress: what each of its roles has read and said."""

  episodes: list[types.Episode]  # of each role
  framing: chat.Framing
  limits: Limits
  strict: bool = False  # see `Rules`

  def give(self, observation: str, info: Mapping[str, Any]) -> tuple[int, engine.Prompt]:
    """Gives the observation to the role that moves next: (its number, what it has to read).

    One that does not fit ends the episode.
    """
    if 'environment_error' in info:
      self._fail(info, 'before its first turn')
      return 0, self._end(truncated=False)
    mover = self._mover(info)
    prompt = self._read(self.episodes[mover], observation, info)
    return mover, self._end(truncated=True) if prompt is None else prompt

  def record(
      self, role: int, completion: engine.Completion, outcome: protocol.Step
  ) -> tuple[int, engine.Prompt]:
    """Adds a turn of a role and its outcome; returns (number of the next role, its prompt)."""
    observation, reward, terminated, truncated, info = outcome
    self._add_turn(self.episodes[role], completion, reward, info)
    self._share_out(info)
    if 'environment_error' in info:
      self._fail(info, f'in turn {sum(len(episode.turns) for episode in self.episodes)}')
    if terminated or truncated:
      return role, self._end(bool(truncated))
    return self.give(observation, info)

  def _mover(self, info):
    """Returns the number of the role that `info` names. UserError: it names none of them."""
    roles = [episode.role for episode in self.episodes]
    if roles == ['']:
      return 0
    if info.get('role') not in roles:
      raise types.UserError(
          f"the environment gave info['role'] = {info.get('role')!r} for the one that moves next: "
          f'its roles are {", ".join(roles)}'
      )
    return roles.index(info['role'])

  def _read(self, episode, observation, info):
    """Adds the prompt, or the observation after the last turn; None where it is too long."""
    limits = self.limits
    if not episode.turns:
      ids, longest = first_prompt(self.framing.tokenizer, observation, info), longest_prompt(limits)
      fits = 0 < len(ids) <= longest
      episode.prompt = np.array(ids[: max(longest, 0)], np.int32)
      episode.failed = not fits
      episode.counts['prompt_too_long'] = float(not fits)
      return _prompt(ids, len(ids), limits) if fits else None
    ids = self.framing.encode(protocol.full_text(observation, info), episode.turns[-1].tokens)
    length = (
        len(episode.prompt)
        + len(ids)
        + sum(len(turn.tokens) + len(turn.observation) for turn in episode.turns)
    )
    if length + _least_turn(limits) > limits.max_total_tokens:
      return None
    episode.turns[-1].observation = np.array(ids, np.int32)
    return _prompt(ids, length, limits)

  def _fail(self, info, when):
    """Masks the episodes of an environment whose code raised, and logs the first traceback."""
    task = self.episodes[0].task
    line = f'{info["environment_error"]}, on task {task.id!r}, {when}'
    if self.strict:
      raise types.UserError(line)
    logging.log_first_n(
        logging.WARNING,
        '%s. Episodes like this one are not trained on, and env/environment_failed counts them\n%s',
        1,
        line,
        info['traceback'],
    )
    for episode in self.episodes:
      episode.failed, episode.error = True, line

  def _end(self, truncated):
    for episode in self.episodes:
      episode.truncated = truncated
    return _OVER

  def _add_turn(self, episode, completion, reward, info):
    tokens = completion.tokens
    action = str(info.get('action') or 'other')  # a GEM environment names none
    turn = types.Turn(
        tokens,
        completion.logp,
        observation=np.zeros((0,), np.int32),
        action=action,
        reward=finite('reward', reward),
        routes=completion.routes,
    )
    counts = episode.counts
    counts['invalid'] += action == 'invalid'
    counts['repeated'] += any(np.array_equal(tokens, earlier.tokens) for earlier in episode.turns)
    counts['empty'] += not action_text(self.framing.tokenizer, tokens).strip()
    counts['cut'] += action == 'invalid' and len(tokens) >= self.limits.max_turn_tokens
    episode.turns.append(turn)

  def _share_out(self, info):
    """Gives failure, metrics and further rewards of a step to the roles that they concern."""
    of_all = info.get('metrics') or {}
    several = len(self.episodes) > 1
    rewards, own = (several and info.get(key) or {} for key in ('rewards', 'role_metrics'))
    for episode in self.episodes:
      episode.failed |= bool(info.get('retrieval_failed', False))
      for name, value in {**of_all, **own.get(episode.role, {})}.items():
        episode.metrics[name] = finite(f"info['metrics'][{name!r}]", value)
      if episode.turns:
        more = finite(f"info['rewards'][{episode.role!r}]", rewards.get(episode.role, 0.0))
        episode.turns[-1].reward += more
      elif rewards.get(episode.role):
        logging.log_first_n(
            logging.WARNING,
            'a reward of the role %s before its first turn counts nowhere',
            1,
            episode.role,
        )
    roles = [episode.role for episode in self.episodes]
    if unknown := [role for role in [*rewards, *own] if role not in roles]:
      raise types.UserError(
          f'the environment gave rewards or metrics of {unknown[0]!r}: its roles are '
          f'{", ".join(roles)}'
      )


def _prompt(ids: list[int], length: int, limits: Limits) -> engine.Prompt:
  """Returns `ids` to prefill, with the next turn's budget in a context of `length` with them."""
  return engine.Prompt(ids, min(limits.max_turn_tokens, limits.max_total_tokens - length))


def _least_turn(limits: Limits) -> int:
  return min(limits.min_turn_tokens, limits.max_turn_tokens)


def action_text(tokenizer: chat.Tokenizer, tokens: np.ndarray) -> str:
  """Returns the turn's text for the environment, without the eos token that may end it."""
  return tokenizer.decode(tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens)


def finite(what: str, value) -> float:
  """Returns a number of the environment as a float. UserError: it is not finite."""
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    raise types.UserError(f'the environment gave {what} = {value!r}: a finite number is needed')
  return number
