"""A conversation with an agent in the terminal: questions in, its turns, searches and answers out.

The agent plays the run's environment, token by token as it was trained. There is no right answer,
and so no score. A terminal asks for a question and gets colours. From a pipe each line is a
question.
"""

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import os
import queue
import sys
from typing import Any
from typing import TextIO

from absl import logging
import jax
import numpy as np

from stppo_jax import tokenizer as tokenizer_lib
from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.envs import factory
from stppo_jax.envs import program
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import stepping
from stppo_jax.evaluation import players
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import turn_text
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_COLOURS = {'search': '33', 'read': '36', 'answer': '1;32', 'note': '2'}  # codes of a terminal
_PROMPT = '? '


def chat(
    config: Config,
    model: decoder.ModelConfig,
    params: dict,
    description: str,
    lines: Iterable[str] | None = None,
    out: TextIO | None = None,
) -> None:
  """Answers questions until there are no more. Ctrl-C leaves a question, Ctrl-D ends.

  Args:
    config: of the run.
    model: of the policy.
    params: of the policy.
    description: of the policy, for the log.
    lines: questions; None: standard input.
    out: None: standard output.
  """
  screen = Screen(out or sys.stdout)
  prepared = prepare.prepare(config)
  _check_environment(config.env.kind, prepared.env)
  tokenizer = prepared.tokenizer
  sampler = gateway.make_sampler(
      model,
      tokenizer,
      rows=1,
      max_total=config.rollout.max_total,
      top_k=config.rollout.top_k,
      chunks=config.rollout.chunks,
      slot_buckets=config.rollout.slot_buckets,
      platform=jax.devices()[0].platform,
      row_sharding=agent_lib.row_sharding(config, model, sharding.mesh_of(config.mesh)),
  )
  is_typed = lines is None and sys.stdin.isatty()
  if is_typed:
    lines = _typed_lines()
  with scheduler_lib.Scheduler(
      sampler, params, tokenizer.token_bytes, tokenizer.eos_ids
  ) as scheduler:
    player = ChatPlayer(config, prepared, scheduler)
    logging.info('%s; one question per line, Ctrl-C leaves a question, Ctrl-D ends', description)
    for number, line in enumerate(lines or sys.stdin):
      question = line.strip()
      if not question:
        continue
      if not is_typed:
        screen.write_line(_PROMPT + question)
      try:
        player.answer(question, number, screen)
      except KeyboardInterrupt:
        screen.mark('note', 'left')


def _check_environment(name: str, env: factory.EnvFactory) -> None:
  """Raises a UserError for an environment that asks no question."""
  if isinstance(env.make, program.Program):
    raise UserError(
        f'config.env.kind={name!r}: an agent program calls the model itself: use --mode=serve'
    )
  if env.load_tasks is not None or env.rows_per_episode > 1:
    raise UserError(
        f'config.env.kind={name!r} has its own tasks or several agents and asks no question: '
        "--mode=chat needs an environment of questions, such as 'search' or 'tools'"
    )


def _typed_lines() -> Iterator[str]:
  """Yields the lines that a user types."""
  try:
    import readline  # noqa: F401  input() then has a history
  except ImportError:
    pass
  while True:
    try:
      yield input(_PROMPT)
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print()


class ChatPlayer:
  """Plays the environment with one model, and shows what happens as it happens."""

  def __init__(
      self, config: Config, prepared: prepare.Prepared, scheduler: scheduler_lib.Scheduler
  ):
    self._limits = prepare.limits(config)
    self._seed = config.seed
    self._tokenizer = prepared.tokenizer
    self._scheduler = scheduler
    self._temperature = players.temperature(config)
    self._top_p = config.rollout.top_p if self._temperature else 1.0
    settings = dict(prepared.env.settings)
    if 'reward' in settings:
      settings['reward'] = lambda task, answer, transcript: 0.0  # there is no right answer
    self._env = dataclasses.replace(prepared.env, settings=settings)
    self._framing = tokenizer_lib.make_framing(
        prepared.tokenizer, prepared.env.frame, config.rollout.max_observation
    )

  def answer(self, question: str, number: int, screen: 'Screen') -> types.Episode:
    """Plays an episode about the question."""
    task = types.Task(f'chat-{number}', question, dataset='chat')
    keys = episode_lib.row_keys(jax.random.key(self._seed), [task])
    (seed,) = episode_lib.episode_seeds(keys)
    key = np.asarray(jax.random.key_data(keys))[0]
    env = self._env(task, seed)
    core_metrics = self._env.core_metrics
    rules = episode_lib.EpisodeRules(self._limits, core_metrics=core_metrics, strict=True)
    state = episode_lib.EpisodeState(task, self._framing, rules)
    _, prompt = state.observe(*stepping.reset(env, seed))
    (episode,) = state.episodes
    ids: list[int] = []
    answer = None
    while prompt.budget > 0:
      ids += prompt.ids
      completion = self._sample(ids, prompt.budget, key, screen)
      ids += completion.tokens.tolist()
      text = episode_lib.action_text(self._tokenizer, completion.tokens)
      outcome = stepping.step(env, text)
      _, prompt = state.record(0, completion, outcome)
      observation = self._tokenizer.decode(episode.turns[-1].observation)
      answer = _show(screen, text, outcome, observation)
    _show_end(screen, episode, answer, self._limits)
    return episode

  def _sample(
      self, ids: list[int], budget: int, key: np.ndarray, screen: 'Screen'
  ) -> env_pool.TurnCompletion:
    """Samples a turn, and shows it as it comes."""
    chunks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = scheduler_lib.Request(
        ids=list(ids),
        budget=budget,
        key=key,
        emit=lambda *chunk: chunks.put(chunk),
        temperature=self._temperature,
        top_p=self._top_p,
        stop=tuple(stop.encode() for stop in self._env.stop_strings),
    )
    text = turn_text.TurnText(self._tokenizer.token_bytes, self._tokenizer.eos_ids)
    tokens: list[int] = []
    logp: list[float] = []
    finish = None
    self._scheduler.submit([request])
    try:
      while finish is None:
        new_tokens, new_logp, finish = chunks.get()
        tokens += new_tokens
        logp += new_logp
        screen.write(text.feed(new_tokens, finish))
    finally:
      request.cancelled = True
      screen.end_line()
    if finish == 'error':
      raise RunError('the engine has failed, see above: start again')
    return env_pool.TurnCompletion(0, np.array(tokens, np.int32), np.array(logp, np.float32))


def _show(screen: 'Screen', text: str, outcome: protocol.Step, observation: str) -> str | None:
  """Shows the environment's reply to a turn; returns the answer, if the turn was one."""
  *_, terminated, truncated, info = outcome
  if info.get('query'):
    screen.mark('search', str(info['query']))
  if info.get('retrieval_failed'):
    screen.mark('note', 'the search failed')
  for line in observation.strip().splitlines():
    screen.mark('read', line)
  if not terminated or truncated:
    return None
  return info['answer'] if info.get('answer') is not None else rewards.extract_answer(text)


def _show_end(
    screen: 'Screen', episode: types.Episode, answer: str | None, limits: episode_lib.EpisodeLimits
) -> None:
  if answer is not None:
    screen.mark('answer', answer)
  elif not episode.turns:
    longest = episode_lib.longest_prompt(limits)
    screen.mark('note', f'the question is too long: its prompt has more than {longest} tokens')
  elif episode.truncated:
    screen.mark('note', 'no answer: a limit ended the episode')
  else:
    screen.mark('note', 'the episode is over')


class Screen:
  """Writes to a terminal or a pipe. No text of a model or a passage controls the terminal."""

  def __init__(self, out: TextIO):
    self._out = out
    self._has_colours = out.isatty() and 'NO_COLOR' not in os.environ
    self._is_at_start = True

  def write(self, text: str) -> None:
    """Writes a part of the agent's text."""
    self._put(_printable(text))

  def write_line(self, text: str) -> None:
    """Writes a line."""
    self.end_line()
    self._put(_printable(text) + '\n')

  def end_line(self) -> None:
    """Begins a new line, unless the cursor is at the start of one."""
    if not self._is_at_start:
      self._put('\n')

  def mark(self, kind: str, text: str) -> None:
    """Writes a line that is set apart from the agent's text: 'search', 'read', 'answer', 'note'."""
    self.end_line()
    line = f'{kind:>8} | {" ".join(_printable(text).splitlines())}'
    if self._has_colours:
      line = f'\033[{_COLOURS[kind]}m{line}\033[0m'
    self._put(line + '\n')

  def _put(self, text: str) -> None:
    if text:
      self._out.write(text)
      self._out.flush()
      self._is_at_start = text.endswith('\n')


def _printable(text: str) -> str:
  return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
