"""Plays questions with a model behind an OpenAI-compatible address: a baseline for a trained agent.

The same environments and texts, as a chat: what `reset` gives is the first message of the user,
and each observation the next one, whatever the environment's frame; a chat has no other place for
it. Tools are declared by a text before the question, as locally where the chat template shows none:
what a server does with a request's `tools` differs between servers. Turns are texts, so that limits
in tokens are the server's: `rollout.max_turn` is its max_tokens, an episode ends once it counts
`rollout.max_total` tokens, and observations are not cut.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import os
import queue
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax.envs import program
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.evaluation import completions
from stppo_jax.evaluation import player
from stppo_jax.evaluation import records
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import pipeline
from stppo_jax.rollout import prepare
from stppo_jax.training import loop
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_LOOK_S = 0.2  # between two questions whether to stop
_NONE = np.zeros(0, np.int32)
_DECLARED = (
    'the model at config.eval.address reads its tools as a text before the question; an agent '
    'whose chat template shows tools reads them there: the prompts differ'
)


class Remote:
  """A model at an address; each episode is a thread's."""

  batch, roles = 0, ('',)

  def __init__(self, config: schema.Config, stop_requested: Callable[[], bool]):
    if jax.process_count() > 1:
      raise UserError('config.eval.address is asked by one process: leave out --distributed')
    parts = components.resolve(config)
    if isinstance(parts.env.make, program.Program):
      raise UserError(
          f'config.env.kind={config.env.kind!r} with config.eval.address: an agent program takes '
          'an address itself: call it with yours'
      )
    if parts.env.roles:
      raise UserError(
          f'config.env.kind={config.env.kind!r} has several roles, and config.eval.address names '
          'one model: evaluate a checkpoint'
      )
    self.tasks = loop.held_out(config, parts)
    self._env = parts.bind(prepare.make_retriever(config, parts))
    self._threads, self._max_total = config.eval.rows, config.rollout.max_total
    self._max_failed_share = config.retriever.max_failed_share
    self._max_failed = config.rollout.max_failed
    self._stop_requested, self._abandoned = stop_requested, threading.Event()
    hot = player.temperature(config)
    self._client = completions.Client(
        completions.Settings(
            config.eval.address,
            config.eval.model,
            hot,
            config.rollout.top_p if hot else 1.0,
            config.rollout.max_turn,
            self._env.stop_strings,
            os.environ.get('OPENAI_API_KEY', ''),
            config.model.chat_template_kwargs,
        ),
        self._abandoned,
    )
    rows = player.rows_of(self.tasks, config.eval.samples)
    keys = episode_loop.row_keys(jax.random.key(config.seed), [row.task for row in rows])
    self._seeds = dict(zip((row.key for row in rows), episode_loop.episode_seeds(keys)))
    self.said = f'{config.eval.model} at {config.eval.address}'
    self.label = config.eval.model
    self.identity = {'address': config.eval.address, 'model': config.eval.model}
    self.identity |= {'instances': 'of the task'}  # not those of 0.6

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.Played]:
    """Plays rows, in the order in which they end.

    RunError, once the others are played: some have got no answer or no passages, or the environment
    raised in too many.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[records.Row] = queue.SimpleQueue()
    for row in rows:
      waiting.put(row)
    for _ in range(min(self._threads, len(rows))):
      threading.Thread(target=self._work, args=(waiting, ended), daemon=True).start()
    unanswered, played, held_back, in_a_row = [], [], [], 0
    try:
      for _ in rows:
        outcome = self._next(ended)
        in_a_row = in_a_row + 1 if isinstance(outcome, completions.Unanswered) else 0
        if isinstance(outcome, completions.Unanswered):
          unanswered.append(outcome)
        elif isinstance(outcome, Exception):
          raise outcome
        else:
          played.append(outcome.episode)
          if outcome.episode.search_failed or outcome.episode.error:
            held_back.append(outcome)
          else:
            yield outcome
        if in_a_row >= self._threads:
          break
    finally:
      self._abandoned.set()
    if retries := self._client.retries:
      logging.info('%d requests were repeated', retries)
    if unanswered:
      gave_up = in_a_row >= self._threads
      left = f'the last {in_a_row}' if gave_up else f'{len(unanswered)} of {len(rows)} episodes'
      raise RunError(
          f'{self._client.url} gave no answer to {left} ({unanswered[-1]}): the same command plays '
          'them again'
      )
    if (share := pipeline.failed_share(played)) > self._max_failed_share:
      raise RunError(
          f'retrieval failed in {share:.0%} of the held-out episodes: check the retriever, and '
          'give the same command again'
      )
    pipeline.check_environment(played, self._max_failed)
    yield from held_back

  def _next(self, ended) -> Any:
    while True:
      if self._stop_requested():
        raise types.Stopped
      try:
        return ended.get(timeout=_LOOK_S)
      except queue.Empty:
        continue

  def _work(self, waiting, ended):
    """Plays rows until none is left; hands over episodes and errors."""
    while not self._abandoned.is_set():
      try:
        row = waiting.get_nowait()
      except queue.Empty:
        return
      try:
        ended.put(self._episode(row))
      except Exception as error:  # raised again in the thread that waits for it
        ended.put(error)

  def _episode(self, row: records.Row) -> records.Played:
    seed = self._seeds[row.key]
    of_instance = seed if row.task.seed is None else row.task.seed
    env = self._env(row.task, of_instance)
    text, info = stepping.reset(env, of_instance)
    episode = types.Episode(
        row.task, row.sample, _NONE, [], counts={}, core_metrics=self._env.core_metrics
    )
    if 'environment_error' in info:
      _fail(episode, info)
      return records.Played(row, episode, [])
    prompt = info.get('declaration', '') + protocol.full_text(text, info)
    if info.get('tools'):
      logging.log_first_n(logging.WARNING, _DECLARED, 1)
    messages = [{'role': 'user', 'content': prompt}]
    texts: list[tuple[str, str]] = []
    while True:
      try:
        turn = self._client.complete(messages, (seed + len(texts)) % 2**31)
      except completions.TooLong:
        episode.truncated = True
        if not texts:
          episode.failed, episode.counts['prompt_too_long'] = True, 1.0
        return records.Played(row, episode, texts)
      observation, is_over = _record(episode, turn, stepping.step(env, turn.text))
      if turn.total_tokens >= self._max_total and not is_over:
        episode.truncated = is_over = True
      texts.append((turn.text, '' if is_over else observation))
      if is_over:
        return records.Played(row, episode, texts)
      messages += [
          {'role': 'assistant', 'content': turn.text},
          {'role': 'user', 'content': observation},
      ]


def _record(
    episode: types.Episode, turn: completions.Turn, outcome: protocol.Step
) -> tuple[str, bool]:
  """Adds a turn and its outcome to the episode; returns (observation, whether it is over)."""
  observation, reward, terminated, truncated, info = outcome
  action = str(info.get('action') or 'other')
  tokens = np.zeros(turn.num_tokens, np.int32)  # their number is known, and they are not
  made = types.Turn(tokens, tokens.astype(np.float32), _NONE, action)
  made.reward = episode_loop.finite('reward', reward)
  episode.turns.append(made)
  episode.counts['invalid'] = episode.counts.get('invalid', 0.0) + (action == 'invalid')
  episode.failed |= bool(info.get('retrieval_failed', False))
  if 'environment_error' in info:
    _fail(episode, info)
  for name, value in (info.get('metrics') or {}).items():
    episode.metrics[name] = episode_loop.finite(f"info['metrics'][{name!r}]", value)
  episode.truncated = bool(truncated)
  return protocol.full_text(observation, info), bool(terminated or truncated)


def _fail(episode, info):
  """Notes the exception of an environment's code, which ends the episode."""
  error = f'{info["environment_error"]}, on task {episode.task.id!r}'
  episode.failed, episode.error = True, error
