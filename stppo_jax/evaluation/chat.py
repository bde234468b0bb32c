"""A conversation with an agent in the terminal: questions in, its turns, searches and answers out.

The agent plays the run's environment as in an evaluation, and each turn is shown when it ends.
There is no right answer, and so no score. A terminal asks for a question and gets colours. From a
pipe each line is a question.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import sys
from typing import Any
from typing import TextIO

from absl import logging
import jax

from stppo_jax import types
from stppo_jax.assembly import components as components_lib
from stppo_jax.config import Config
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs import stepping
from stppo_jax.evaluation import players
from stppo_jax.models import decoder
from stppo_jax.rollout import agent as agent_lib
from stppo_jax.rollout import episode as episode_lib
from stppo_jax.rollout import prepare
from stppo_jax.text import tokenizer as tokenizer_lib
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
  agent = make_agent(config, model, screen)
  policy = agent.sampler.copy(params)
  is_typed = lines is None and sys.stdin.isatty()
  if is_typed:
    lines = _typed_lines()
  logging.info('%s; one question per line, Ctrl-C leaves a question, Ctrl-D ends', description)
  for number, line in enumerate(lines or sys.stdin):
    question = line.strip()
    if not question:
      continue
    if not is_typed:
      screen.write_line(_PROMPT + question)
    task = types.Task(f'chat-{number}', question, dataset='chat')
    try:
      play(agent, policy, task, screen)
    except KeyboardInterrupt:
      screen.mark('note', 'left')


def make_agent(config: Config, model: decoder.ModelConfig, screen: 'Screen') -> agent_lib.Agent:
  """Returns the agent of an evaluation with one row, whose environment shows its turns."""
  components = components_lib.resolve(config)
  env = components.env
  players.check_environment(config, env)
  if env.load_tasks is not None:
    raise UserError(
        f'config.env.kind={config.env.kind!r} has its own tasks and asks no question: --mode=chat '
        "needs an environment of questions, such as 'search' or 'tools'"
    )
  settings = dict(env.settings)
  if 'reward' in settings:
    settings['reward'] = lambda task, answer, transcript: 0.0  # there is no right answer

  def cut(text):
    tokenizer = components.tokenizer
    framing = tokenizer_lib.make_framing(tokenizer, env.frame, config.rollout.max_observation)
    return tokenizer.decode(framing.encode(text, ()))

  def make_shown(task, **kwargs):
    return ShownEnv(env.make(task, **kwargs), screen, cut)

  shown = dataclasses.replace(env, make=make_shown, settings=settings)
  components = dataclasses.replace(components, env=shown).load()
  rollout = dataclasses.replace(config.rollout, rows=1, max_failed=0.0, threads=0)
  one_row = dataclasses.replace(config.eval, rows=1)
  config = dataclasses.replace(config, rollout=rollout, eval=one_row)
  return players.make_agent(config, components, model)


def _typed_lines() -> Iterator[str]:
  """Yields the lines that a user types."""
  with contextlib.suppress(ImportError):  # without it, input() has no history
    import readline  # noqa: F401
  while True:
    try:
      yield input(_PROMPT)
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print()


def play(
    agent: agent_lib.Agent, params: object, task: types.Task, screen: 'Screen'
) -> types.Episode:
  """Plays an episode about a question, and shows how it ended without an answer."""
  keys = episode_lib.row_keys(jax.random.key(agent.config.seed), [task])
  is_greedy = players.temperature(agent.config) == 0
  (episode,) = agent.play(params, [task], keys, greedy=is_greedy)
  if not episode.turns:
    longest = episode_lib.longest_prompt(prepare.limits(agent.config))
    screen.mark('note', f'the question is too long: its prompt has more than {longest} tokens')
  elif episode.truncated:
    screen.mark('note', 'no answer: a limit ended the episode')
  return episode


class ShownEnv:
  """An environment that shows its turns: the agent's text, its search, and what it reads.

  Args:
    env: that takes the steps.
    screen: to show them on.
    cut: returns an observation as the agent reads it, which may be less of it.
  """

  def __init__(self, env: protocol.Env, screen: 'Screen', cut: Callable[[str], str]):
    self._env = env
    self._screen = screen
    self._cut = cut

  def __getattr__(self, name: str) -> Any:
    return getattr(self._env, name)

  def step(self, action: str, **passages: Any) -> protocol.Step:
    """Takes a step of the environment, and shows it."""
    screen = self._screen
    screen.write_line(action)
    outcome = stepping.step(self._env, action, **passages)
    observation, _, terminated, truncated, info = outcome
    if info.get('query'):
      screen.mark('search', str(info['query']))
    if info.get('retrieval_failed'):
      screen.mark('note', 'the search failed')
    if not terminated and not truncated:
      text = self._cut(protocol.full_text(observation, info))
      for line in text.strip().splitlines():
        screen.mark('read', line)
    if terminated and not truncated:
      answer = info.get('answer') or rewards.extract_answer(action)
      screen.mark('answer', answer or 'none: the episode is over')
    return outcome


class Screen:
  """Writes to a terminal or a pipe. No text of a model or a passage controls the terminal."""

  def __init__(self, out: TextIO):
    self._out = out
    self._has_colours = out.isatty() and 'NO_COLOR' not in os.environ

  def write_line(self, text: str) -> None:
    """Writes a text, and ends its last line."""
    self._out.write(_printable(text).rstrip('\n') + '\n')
    self._out.flush()

  def mark(self, kind: str, text: str) -> None:
    """Writes a line that is set apart from the agent's text: 'search', 'read', 'answer', 'note'."""
    line = f'{kind:>8} | {" ".join(_printable(text).splitlines())}'
    if self._has_colours:
      line = f'\033[{_COLOURS[kind]}m{line}\033[0m'
    self._out.write(line + '\n')
    self._out.flush()


def _printable(text: str) -> str:
  return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
