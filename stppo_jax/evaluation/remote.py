"""Plays questions with a model behind an OpenAI-compatible address: a baseline for a trained agent.

The environments and texts are those of the agent, as a chat. The observation of `reset` is the
first message of the user, and each later observation is the next one. The environment's frame has
no effect. Tools are declared in a text before the question, because servers treat the field `tools`
of a request differently. Turns are texts, so the server applies the limits in tokens.
`rollout.max_turn` is its max_tokens, an episode ends once the server counts `rollout.max_total`
tokens, and observations are not cut.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import queue
import threading
from typing import Any

from absl import logging
import jax
import numpy as np

from stppo_jax import types
from stppo_jax.assembly import components as components_lib
from stppo_jax.config import Config
from stppo_jax.envs import protocol
from stppo_jax.envs import stepping
from stppo_jax.evaluation import client as client_lib
from stppo_jax.evaluation import players
from stppo_jax.evaluation import records
from stppo_jax.net import api_keys
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.serving import stop_strings
from stppo_jax.stop_signal import StopSignal
from stppo_jax.text import thoughts
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_POLL_S = 0.2  # between two looks at the signal
_NO_TOKENS = np.zeros(0, np.int32)
_DECLARED = (
    'the model at config.eval.address reads its tools as a text before the question; an agent '
    'whose chat template shows tools reads them there: the prompts differ'
)


class RemotePlayer(players.Player):
  """A model at an address. A thread plays each episode."""

  rows_per_episode = 1
  batch = 0

  def __init__(self, config: Config, stop_signal: StopSignal):
    if jax.process_count() > 1:
      raise UserError('config.eval.address works with one process: leave out --distributed')
    components = components_lib.resolve(config)
    players.check_environment(config, components.env)
    self.tasks = components.held_out
    self.description = f'{config.eval.model} at {config.eval.address}'
    self.label = config.eval.model
    self._config = config
    self._env = components.env_with_retriever
    self.identity = {
        'address': config.eval.address,
        'model': config.eval.model,
        'passages': components.passages_digest,
    }
    self._stop_signal = stop_signal
    self._is_over = StopSignal()  # ends the threads with the job
    self._guard = prepare.make_guard(config, self._is_over)
    temperature = players.temperature(config)
    fields: dict[str, Any] = {
        'model': config.eval.model,
        'max_tokens': config.rollout.max_turn,
        'temperature': temperature,
    }
    if temperature and config.rollout.top_p < 1:
      fields['top_p'] = config.rollout.top_p
    # vLLM and SGLang take these two. Another server may reject the request, and the job ends.
    if temperature and config.rollout.top_k:
      fields['top_k'] = config.rollout.top_k
    if config.model.chat_template_kwargs:
      fields['chat_template_kwargs'] = dict(config.model.chat_template_kwargs)
    self._is_greedy = not temperature
    self._client = client_lib.ChatClient(
        config.eval.address,
        api_keys.read('OPENAI_API_KEY'),
        fields,
        # The server would also stop in a thought. Without them, `_action_text` cuts the turn.
        () if self._env.skips_thoughts else self._env.stop_strings,
        self._is_over,
    )
    keys = players.row_keys(config, self.tasks)
    seeds = episode_lib.episode_seeds(jax.numpy.stack(list(keys.values())))
    self._seeds = dict(zip(keys, seeds))

  def play(self, rows: Sequence[records.Row]) -> Iterator[records.PlayedRow]:
    """Plays rows, and yields them in the order in which they end.

    RunError, after the other rows: the server did not answer in some episodes, or retrieval or the
    environment failed in too many of them.
    """
    eval_rows = self._config.eval.rows
    episodes: list[types.Episode] = []
    failed: list[records.PlayedRow] = []
    unanswered: list[Exception] = []
    in_a_row = 0  # episodes without an answer
    waiting: queue.SimpleQueue[records.Row] = queue.SimpleQueue()
    ended: queue.SimpleQueue[records.PlayedRow | Exception] = queue.SimpleQueue()
    for row in rows:
      waiting.put(row)
    # Daemons, because the process of a stopped job would wait for the requests of other threads.
    for _ in range(min(eval_rows, len(rows))):
      threading.Thread(
          target=self._work, args=(waiting, ended), name='episodes', daemon=True
      ).start()
    num_left = len(rows)
    try:
      while num_left and in_a_row < eval_rows:
        self._stop_signal.raise_if_set()
        try:
          outcome = ended.get(timeout=_POLL_S)
        except queue.Empty:
          continue
        num_left -= 1
        if isinstance(outcome, client_lib.UnansweredError):
          unanswered.append(outcome)
          in_a_row += 1
          continue
        if isinstance(outcome, Exception):
          raise outcome
        in_a_row = 0
        episodes.append(outcome.episode)
        if outcome.episode.search_failed or outcome.episode.error:
          failed.append(outcome)
        else:
          yield outcome
    finally:
      self._is_over.set()
    if unanswered:
      raise RunError(
          f'{self._config.eval.address} gave no answer to {len(unanswered)} of {len(rows)} '
          f'episodes ({unanswered[-1]}): the same command plays them again'
      )
    players.check_failures(self._config, episodes)
    yield from failed

  def _work(self, waiting: queue.SimpleQueue, ended: queue.SimpleQueue) -> None:
    """Plays rows until none is left; hands over episodes and errors."""
    while not self._is_over.is_set():
      try:
        row = waiting.get_nowait()
      except queue.Empty:
        return
      try:
        ended.put(self._play_row(row))
      except Exception as error:  # raised again in the thread that waits for it
        ended.put(error)

  def _play_row(self, row: records.Row) -> records.PlayedRow:
    seed = self._seeds[row.key]
    instance_seed = seed if row.task.seed is None else row.task.seed
    env = self._env(row.task, instance_seed, self._guard)
    text, info = stepping.reset(env, instance_seed)
    episode = types.Episode(
        row.task, row.sample, _NO_TOKENS, [], core_metrics=self._env.core_metrics
    )
    texts: list[tuple[str, str]] = []
    played = records.PlayedRow(row, episode, texts)
    if 'environment_error' in info:
      _fail(episode, info)
      return played
    if info.get('tools'):
      logging.log_first_n(logging.WARNING, _DECLARED, 1)
    prompt = info.get('declaration', '') + protocol.full_text(text, info)
    messages = [{'role': 'user', 'content': prompt}]
    is_over = False
    while not is_over:
      try:
        turn_seed = None if self._is_greedy else (seed + len(texts)) % 2**31
        turn = self._client.complete(messages, turn_seed)
      except client_lib.TooLongError:
        episode.truncated = True
        if not texts:
          episode.failed = True
          episode.counts['prompt_too_long'] = 1.0
        break
      action = self._action_text(turn.text)
      observation, is_over = _add_turn(episode, turn, stepping.step(env, action))
      if turn.total_tokens >= self._config.rollout.max_total and not is_over:
        episode.truncated = True
        is_over = True
      texts.append((turn.text, '' if is_over else observation))
      messages += [
          {'role': 'assistant', 'content': turn.text},
          {'role': 'user', 'content': observation},
      ]
    return played

  def _action_text(self, text: str) -> str:
    """Returns a turn as the environment reads it, also if the template has opened its thought."""
    text = thoughts.completed(text)
    return stop_strings.cut(text, self._env.stop_strings) if self._env.skips_thoughts else text


def _add_turn(
    episode: types.Episode, turn: client_lib.ChatCompletion, outcome: protocol.Step
) -> tuple[str, bool]:
  """Adds a turn and its outcome to the episode; returns (observation, whether it is over)."""
  observation, reward, terminated, truncated, info = outcome
  action = str(info.get('action') or 'other')
  tokens = np.zeros(turn.num_tokens, np.int32)  # the server gives only their number
  reward = episode_lib.finite('reward', reward)
  logp = tokens.astype(np.float32)
  episode.turns.append(types.Turn(tokens, logp, _NO_TOKENS, action, reward))
  episode.counts['invalid'] = episode.counts.get('invalid', 0.0) + (action == 'invalid')
  episode.failed |= bool(info.get('retrieval_failed', False))
  if 'environment_error' in info:
    _fail(episode, info)
  for name, value in (info.get('metrics') or {}).items():
    episode.metrics[name] = episode_lib.finite(f"info['metrics'][{name!r}]", value)
  is_over = bool(terminated or truncated)
  episode.truncated = bool(truncated) or (is_over and turn.is_cut)
  return protocol.full_text(observation, info), is_over


def _fail(episode: types.Episode, info: Mapping[str, object]) -> None:
  """Stores the exception of an environment's code, which ends the episode."""
  episode.failed = True
  episode.error = f'{info["environment_error"]}, on task {episode.task.id!r}'
