"""A conversation with an agent in the terminal: questions in, its turns, searches and answers out.

The agent plays the run's environment, token by token as it was trained; there is no right answer,
and so no score. A terminal asks for a question and gets colours. From a pipe each line is one.
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

from stppo_jax import config as schema
from stppo_jax import tokenizer as chat
from stppo_jax import types
from stppo_jax.envs import factory
from stppo_jax.envs import program
from stppo_jax.envs import rewards
from stppo_jax.envs import stepping
from stppo_jax.evaluation import player
from stppo_jax.models import decoder
from stppo_jax.models import sharding
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import env_pool
from stppo_jax.rollout import episode as episode_loop
from stppo_jax.rollout import prepare
from stppo_jax.serving import gateway
from stppo_jax.serving import scheduler as scheduler_lib
from stppo_jax.serving import turn_text
from stppo_jax.types import RunError
from stppo_jax.types import UserError

_COLOURS = {'search': '33', 'read': '36', 'answer': '1;32', 'note': '2'}  # of a terminal
_PROMPT = '? '


def talk(
    config: schema.Config,
    model: decoder.ModelConfig,
    params: dict,
    said: str,  # which model it is
    lines: Iterable[str] | None = None,  # questions; None: standard input
    out: TextIO | None = None,  # None: standard output
) -> None:
  """Answers questions until there are no more. Ctrl-C leaves a question, Ctrl-D ends."""
  screen = Screen(out or sys.stdout)
  prepared = prepare.prepare(config)
  _check_environment(config, prepared.env)
  sampler = gateway.make_sampler(
      model,
      prepared.tokenizer,
      rows=1,
      max_total=config.rollout.max_total,
      top_k=config.rollout.top_k,
      chunks=config.rollout.chunks,
      slot_buckets=config.rollout.slot_buckets,
      platform=jax.devices()[0].platform,
      row_sharding=agent_lib.row_sharding(config, model, sharding.mesh_of(config.mesh)),
  )
  tokenizer = prepared.tokenizer
  with scheduler_lib.Scheduler(
      sampler, params, tokenizer.token_bytes, tokenizer.eos_ids
  ) as scheduler:
    speaker = Speaker(config, prepared, scheduler)
    logging.info('%s; one question per line, Ctrl-C leaves a question, Ctrl-D ends', said)
    types_it = lines is None and sys.stdin.isatty()
    for number, line in enumerate(_typed() if types_it else lines or sys.stdin):
      if not (question := line.strip()):
        continue
      if not types_it:
        screen.line(_PROMPT + question)
      try:
        speaker.answer(question, number, screen)
      except KeyboardInterrupt:
        screen.mark('note', 'left')


def _check_environment(config, env: factory.EnvFactory) -> None:
  """Refuses environments that ask no question."""
  if isinstance(env.make, program.Program):
    raise UserError(
        f'config.env.kind={config.env.kind!r}: an agent program talks by itself: use --mode=serve'
    )
  if env.load_tasks is not None or env.roles:
    raise UserError(
        f'config.env.kind={config.env.kind!r} has tasks or roles of its own and asks no question: '
        "--mode=chat needs an environment of questions, such as 'search' or 'tools'"
    )


def _typed() -> Iterator[str]:
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


class Speaker:
  """Plays the environment with one model, and shows what happens as it happens."""

  def __init__(
      self, config: schema.Config, prepared: prepare.Prepared, scheduler: scheduler_lib.Scheduler
  ):
    self._limits, self._seed = prepare.limits(config), config.seed
    self._tokenizer, self._scheduler = prepared.tokenizer, scheduler
    self._temperature = player.temperature(config)
    self._top_p = config.rollout.top_p if self._temperature else 1.0
    settings = dict(prepared.env.settings)
    if 'reward' in settings:
      settings['reward'] = lambda task, answer, transcript: 0.0  # there is no right answer
    self._env = dataclasses.replace(prepared.env, settings=settings)
    self._framing = chat.make_framing(
        prepared.tokenizer, prepared.env.frame, config.rollout.max_observation
    )

  def answer(self, question: str, number: int, screen: 'Screen') -> types.Episode:
    """Plays an episode about the question."""
    task = types.Task(f'chat-{number}', question, dataset='chat')
    keys = episode_loop.row_keys(jax.random.key(self._seed), [task])
    (seed,), key = episode_loop.episode_seeds(keys), np.asarray(jax.random.key_data(keys))[0]
    env = self._env(task, seed)
    rules = episode_loop.Rules(self._limits, core_metrics=self._env.core_metrics)
    (episode,) = seats = episode_loop.seats(task, 0, 0, rules)
    table = episode_loop.Table(seats, self._framing, self._limits, strict=True)
    _, prompt = table.give(*stepping.reset(env, seed))
    ids, found = [], None
    while prompt.budget > 0:
      ids += prompt.ids
      completion = self._sample(ids, prompt.budget, key, screen)
      ids += completion.tokens.tolist()
      text = episode_loop.action_text(self._tokenizer, completion.tokens)
      outcome = stepping.step(env, text)
      _, prompt = table.record(0, completion, outcome)
      found = _show(screen, text, outcome, self._tokenizer.decode(episode.turns[-1].observation))
    _show_end(screen, episode, found, self._limits)
    return episode

  def _sample(self, ids, budget, key, screen) -> env_pool.Completion:
    """Samples a turn, and shows it as it comes."""
    pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = scheduler_lib.Request(
        ids=list(ids),
        budget=budget,
        key=key,
        emit=lambda *piece: pieces.put(piece),
        temperature=self._temperature,
        top_p=self._top_p,
        stop=tuple(stop.encode() for stop in self._env.stop_strings),
    )
    text = turn_text.TurnText(self._tokenizer.token_bytes, self._tokenizer.eos_ids)
    tokens: list[int] = []
    logp: list[float] = []
    self._scheduler.submit([request])
    finish = None
    try:
      while finish is None:
        new, new_logp, finish = pieces.get()
        tokens += new
        logp += new_logp
        screen.say(text.feed(new, finish))
    finally:
      request.cancelled = True
      screen.end_line()
    if finish == 'error':
      raise RunError('the engine has failed, see above: start again')
    return env_pool.Completion(0, np.array(tokens, np.int32), np.array(logp, np.float32))


def _show(screen, text, outcome, read) -> str | None:
  """Shows what the environment made of a turn; returns the answer, if the turn was one."""
  *_, terminated, truncated, info = outcome
  if info.get('query'):
    screen.mark('search', str(info['query']))
  if info.get('retrieval_failed'):
    screen.mark('note', 'the search failed')
  for line in read.strip().splitlines():
    screen.mark('read', line)
  if not terminated or truncated:
    return None
  return info['answer'] if info.get('answer') is not None else rewards.extract_answer(text)


def _show_end(screen, episode, found, limits) -> None:
  if found is not None:
    screen.mark('answer', found)
  elif not episode.turns:
    longest = episode_loop.longest_prompt(limits)
    screen.mark('note', f'the question is too long: its prompt has more than {longest} tokens')
  elif episode.truncated:
    screen.mark('note', 'no answer: a limit ended the episode')
  else:
    screen.mark('note', 'the episode is over')


class Screen:
  """Writes to a terminal or a pipe; no text of a model or a passage controls the terminal."""

  def __init__(self, out: TextIO):
    self._out = out
    self._colours = out.isatty() and 'NO_COLOR' not in os.environ
    self._at_start = True

  def say(self, text: str) -> None:
    """Writes a piece of the agent's text."""
    if text:
      self._write(_harmless(text))

  def end_line(self) -> None:
    """Begins a new line, unless there is one."""
    if not self._at_start:
      self._write('\n')

  def line(self, text: str) -> None:
    """Writes a line."""
    self.end_line()
    self._write(_harmless(text) + '\n')

  def mark(self, kind: str, text: str) -> None:
    """Writes a line that is set apart from the agent's text: 'search', 'read', 'answer', 'note'."""
    self.end_line()
    text = f'{kind:>8} | {" ".join(_harmless(text).splitlines())}'
    self._write(f'\033[{_COLOURS[kind]}m{text}\033[0m\n' if self._colours else f'{text}\n')

  def _write(self, text):
    self._out.write(text)
    self._out.flush()
    self._at_start = text.endswith('\n')


def _harmless(text: str) -> str:
  return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
