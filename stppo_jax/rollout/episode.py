"""Plays many environments at once: tasks in, Episodes out, ids all the way.

The engine decides who speaks when; turns that end together step their environments together, so that
one retriever call serves them all. An agent's turn is decoded for the environment to read; what is
kept, and read again by the model, are the sampled ids.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import time
import zlib

import chex
import jax
import numpy as np

from stppo_jax import chat
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import engine
from stppo_jax.rollout import sampler as sampler_lib

_OVER = engine.Cue(ids=(), budget=0)
StepEnvs = Callable[[Sequence[protocol.Env], Sequence[str]], Sequence[protocol.Step]]


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


def play(
    sampler: sampler_lib.Sampler,
    params,
    tokenizer: chat.Tokenizer,
    envs: Sequence[protocol.Env],  # each made for its task
    tasks: Sequence[types.Task],
    groups: Sequence[int],
    keys: jax.Array,  # [episodes] random keys, see `row_keys`
    limits: Limits,
    step_envs: StepEnvs = protocol.step_all,
    threads: int = 0,  # calls of `step_envs` at once, of environments that are not stepped meanwhile
) -> tuple[list[types.Episode], engine.Report]:
  """One episode for each environment, in their order, and what they took.

  An episode depends on its environment, key and prompt: not on the others, nor on how long any
  environment takes. Environments that share something are to lock it if there are threads.
  """
  chex.assert_equal(len(envs), len(tasks))
  chex.assert_equal(len(envs), len(groups))
  if limits.max_total_tokens > sampler.max_slots:
    raise types.UserError(
        f'max_total_tokens={limits.max_total_tokens} but the sampler was built for '
        f'max_slots={sampler.max_slots}: build it for at least as many'
    )
  started = time.perf_counter()
  episodes, prompts = [], []
  for env, task, group in zip(envs, tasks, groups):
    message = protocol.with_suffix(*protocol.isolated_reset(env))
    episode, cue = _begin(task, group, chat.encode_prompt(tokenizer, message), limits)
    episodes.append(episode)
    prompts.append(cue)
  reset_s = time.perf_counter() - started

  def respond(turns: list[engine.Said]) -> list[engine.Cue]:
    actions = [_action_text(tokenizer, turn.tokens) for turn in turns]
    outcomes = step_envs([envs[turn.index] for turn in turns], actions)
    return [
        _record(episodes[turn.index], turn, outcome, tokenizer, limits)
        for turn, outcome in zip(turns, outcomes)
    ]

  report = engine.run(sampler, params, prompts, keys, respond, threads)
  report.seconds['env'] += reset_s
  return episodes, report


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


def _begin(task, group, prompt: list[int], limits: Limits) -> tuple[types.Episode, engine.Cue]:
  """An episode without turns. One whose prompt is too long is over."""
  longest = min(limits.max_prompt_tokens, limits.max_total_tokens - _least_turn(limits))
  fits = 0 < len(prompt) <= longest
  episode = types.Episode(
      task=task,
      group=group,
      prompt=np.array(prompt[: max(longest, 0)], np.int32),
      turns=[],
      truncated=not fits,
      failed=not fits,
      metrics={
          'em': 0.0,
          'f1': 0.0,
          'searches': 0.0,
          'invalid': 0.0,
          'turns': 0.0,
          'repeated': 0.0,
          'empty': 0.0,
          'cut': 0.0,
      },
  )
  episode.metrics['prompt_too_long'] = float(not fits)
  return episode, _cue(prompt, len(prompt), limits) if fits else _OVER


def _cue(ids: list[int], length: int, limits: Limits) -> engine.Cue:
  """Read `ids`, with which the context is `length` long, and say a turn."""
  return engine.Cue(ids, min(limits.max_turn_tokens, limits.max_total_tokens - length))


def _least_turn(limits: Limits) -> int:
  return min(limits.min_turn_tokens, limits.max_turn_tokens)


def _action_text(tokenizer: chat.Tokenizer, tokens: np.ndarray) -> str:
  """What the environment reads: the turn's text, without the eos token if it ended on one."""
  return tokenizer.decode(tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens)


def _record(
    episode: types.Episode,
    said: engine.Said,
    outcome: protocol.Step,
    tokenizer: chat.Tokenizer,
    limits: Limits,
) -> engine.Cue:
  """Adds a turn and its outcome to the episode; how it goes on."""
  observation, reward, terminated, truncated, info = outcome
  action = info.get('action', 'other')  # a GEM environment names none
  turn = types.Turn(said.tokens, said.logp, observation=np.zeros((0,), np.int32), action=action)
  repeated = any(np.array_equal(said.tokens, earlier.tokens) for earlier in episode.turns)
  episode.turns.append(turn)
  episode.score += float(reward)
  episode.failed |= bool(info.get('retrieval_failed', False))
  episode.metrics['turns'] += 1
  episode.metrics['searches'] += action == 'search'
  episode.metrics['invalid'] += action == 'invalid'
  episode.metrics['repeated'] += repeated
  episode.metrics['empty'] += not _action_text(tokenizer, said.tokens).strip()
  episode.metrics['cut'] += action == 'invalid' and len(said.tokens) >= limits.max_turn_tokens
  for name in ('em', 'f1'):
    episode.metrics[name] = float(info.get(name, episode.metrics[name]))
  if terminated or truncated:
    episode.truncated = bool(truncated)
    return _OVER
  text = protocol.with_suffix(observation, info)
  ids = chat.encode_observation(tokenizer, text, limits.max_observation_tokens)
  length = (
      len(episode.prompt)
      + len(ids)
      + sum(len(turn.tokens) + len(turn.observation) for turn in episode.turns)
  )
  if length + _least_turn(limits) > limits.max_total_tokens:
    episode.truncated = True
    return _OVER
  turn.observation = np.array(ids, np.int32)
  return _cue(ids, length, limits)
