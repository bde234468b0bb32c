"""Plays many environments at once: tasks in, Episodes out, ids all the way.

Each round reads what came back (prefill), samples one turn of every live row (decode), and steps
the environments together, so that one retriever call serves them all. An agent's turn is decoded
for the environment to read; what is kept, and read again by the model, are the sampled ids.
"""

import collections
import contextlib
import dataclasses
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence

import chex
import jax
import numpy as np

from stppo_jax import chat
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import sampler as sampler_lib


@dataclasses.dataclass(frozen=True)
class Limits:
  """How long things may get, in tokens. The defaults are Search-R1's."""

  max_prompt_tokens: int = 2048  # a longer prompt is not played: truncated, failed, counted
  max_turn_tokens: int = 500  # a longer turn is cut, and reaches the environment without its tag
  max_observation_tokens: int = 500  # a longer observation is cut, but for its closing tag
  max_total_tokens: int = 4096  # prompt, turns and observations
  min_turn_tokens: int = 8  # an observation that leaves less room than this ends the episode

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise types.UserError(f'{field.name}={getattr(self, field.name)}: give 1 or more')


@dataclasses.dataclass
class _Row:
  """An episode under way."""

  env: protocol.Env
  episode: types.Episode
  unread: list[int]  # ids the model has not read yet; empty once the row is over
  length: int  # of the context, with `unread`
  alive: bool = True


def play(
  sampler: sampler_lib.Sampler,
  params,
  tokenizer: chat.Tokenizer,
  envs: Sequence[protocol.Env],  # one a row, each made for its task
  tasks: Sequence[types.Task],
  groups: Sequence[int],
  keys: jax.Array,  # [rows] random keys, see `row_keys`
  limits: Limits,
  timing_s: dict[str, float] | None = None,  # 'prefill', 'decode' and 'env' are added to
  step_envs: Callable = protocol.step_all,  # (envs, actions) -> outcomes, in their order
) -> list[types.Episode]:
  """One episode for each environment, in their order.

  With more environments than the sampler's largest row bucket, they are played in several waves.
  """
  chex.assert_equal(len(envs), len(tasks))
  chex.assert_equal(len(envs), len(groups))
  chex.assert_equal(len(envs), keys.shape[0])
  if limits.max_total_tokens > sampler.max_slots:
    raise types.UserError(
      f'max_total_tokens={limits.max_total_tokens} but the sampler was built for '
      f'max_slots={sampler.max_slots}: build it for at least as many'
    )
  timing_s = {} if timing_s is None else timing_s
  with _timed(timing_s, 'env'):
    rows = [_reset(*row, tokenizer, limits) for row in zip(envs, tasks, groups)]
  for start in range(0, len(rows), sampler.row_buckets[-1]):
    wave = slice(start, start + sampler.row_buckets[-1])
    _play_wave(sampler, params, tokenizer, rows[wave], keys[wave], limits, timing_s, step_envs)
  return [row.episode for row in rows]


def row_keys(key: jax.Array, tasks: Sequence[types.Task]) -> jax.Array:
  """A key for each row, from `key`, its task's id and how often that task came before, alone."""
  seen: collections.Counter[str] = collections.Counter()
  samples = np.zeros((len(tasks),), np.uint32)
  for i, task in enumerate(tasks):
    samples[i] = seen[task.id]
    seen[task.id] += 1
  ids = np.array([zlib.crc32(task.id.encode('utf-8')) for task in tasks], np.uint32)
  fold = lambda task_id, sample: jax.random.fold_in(jax.random.fold_in(key, task_id), sample)
  return jax.vmap(fold)(ids, samples)


def _play_wave(sampler, params, tokenizer, rows, keys, limits, timing_s, step_envs):
  """Plays `rows` to their ends, in place."""
  bucket = sampler.row_bucket(len(rows))
  idle = bucket - len(rows)  # rows of padding: no context, no budget
  state = sampler.start(keys[np.minimum(np.arange(bucket), len(rows) - 1)])
  while any(row.alive for row in rows):
    with _timed(timing_s, 'prefill'):
      state = sampler.feed(params, state, [row.unread for row in rows] + [[]] * idle)
      jax.block_until_ready(state.logits)
    with _timed(timing_s, 'decode'):
      budgets = [_budget(row, limits) for row in rows] + [0] * idle
      state, tokens, logp = sampler.generate(params, state, budgets)
    with _timed(timing_s, 'env'):
      turns = [(row, t, lp) for row, t, lp in zip(rows, tokens, logp) if row.alive]
      actions = [_action_text(tokenizer, t) for _, t, _ in turns]
      outcomes = step_envs([row.env for row, _, _ in turns], actions)
      for (row, t, lp), outcome in zip(turns, outcomes):
        _record(row, t, lp, outcome, tokenizer, limits)


def _reset(env, task, group, tokenizer, limits) -> _Row:
  message = protocol.with_suffix(*protocol.isolated_reset(env))
  prompt = chat.encode_prompt(tokenizer, message)
  longest = min(limits.max_prompt_tokens, limits.max_total_tokens - _least_turn(limits))
  fits = 0 < len(prompt) <= longest
  episode = types.Episode(
    task=task,
    group=group,
    prompt=np.array(prompt[: max(longest, 0)], np.int32),
    turns=[],
    truncated=not fits,
    failed=not fits,
    metrics={'em': 0.0, 'f1': 0.0, 'searches': 0.0, 'invalid': 0.0, 'turns': 0.0},
  )
  episode.metrics['prompt_too_long'] = float(not fits)
  return _Row(env, episode, unread=prompt if fits else [], length=len(prompt), alive=fits)


def _budget(row: _Row, limits: Limits) -> int:
  """How many tokens the row may sample in this turn."""
  if not row.alive:
    return 0
  return min(limits.max_turn_tokens, limits.max_total_tokens - row.length)


def _least_turn(limits: Limits) -> int:
  return min(limits.min_turn_tokens, limits.max_turn_tokens)


def _action_text(tokenizer: chat.Tokenizer, tokens: np.ndarray) -> str:
  """What the environment reads: the turn's text, without the eos token if it ended on one."""
  return tokenizer.decode(tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens)


def _record(row: _Row, tokens, logp, outcome, tokenizer: chat.Tokenizer, limits: Limits) -> None:
  """Adds a turn and its outcome to the row's episode; decides whether and how it goes on."""
  observation, reward, terminated, truncated, info = outcome
  episode = row.episode
  action = info.get('action', 'other')  # a GEM environment names none
  turn = types.Turn(tokens, logp, observation=np.zeros((0,), np.int32), action=action)
  episode.turns.append(turn)
  episode.score += float(reward)
  episode.failed |= bool(info.get('retrieval_failed', False))
  episode.metrics['turns'] += 1
  episode.metrics['searches'] += action == 'search'
  episode.metrics['invalid'] += action == 'invalid'
  for name in ('em', 'f1'):
    episode.metrics[name] = float(info.get(name, episode.metrics[name]))
  row.length += len(tokens)
  row.unread = []
  if terminated or truncated:
    episode.truncated = bool(truncated)
    row.alive = False
    return
  text = protocol.with_suffix(observation, info)
  ids = chat.encode_observation(tokenizer, text, limits.max_observation_tokens)
  if row.length + len(ids) + _least_turn(limits) > limits.max_total_tokens:
    episode.truncated = True
    row.alive = False
    return
  turn.observation = np.array(ids, np.int32)
  row.unread = ids
  row.length += len(ids)


@contextlib.contextmanager
def _timed(timing_s: dict[str, float], name: str):
  start = time.perf_counter()
  yield
  timing_s[name] = timing_s.get(name, 0.0) + time.perf_counter() - start
