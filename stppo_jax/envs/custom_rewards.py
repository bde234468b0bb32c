"""Rewards of users: functions of several shapes, and outages of the servers that they call.

A reward takes (task, answer, transcript). Functions written for verl and TRL are recognised by the
names of their parameters:

  verl  compute_score(data_source, solution_str, ground_truth, extra_info=None)
  TRL   reward(completions, **kwargs), with lists of one element, and columns by name

A result is a number, {'score': number, other metrics}, or a pair (number, metrics). A function may
be `async`.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import functools
import inspect
import reprlib
import threading
import time
from typing import Any

from absl import logging

from stppo_jax import plugins
from stppo_jax import types
from stppo_jax.envs import guard
from stppo_jax.envs import outages
from stppo_jax.envs import rewards

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_TRIES = 3  # calls that fail before another answer is scored to see whether the reward works
_LOOP_S = 5.0  # an event loop that starts no call for this long is blocked
_OURS = ('task', 'answer', 'transcript')
_VERL = ('data_source', 'solution_str', 'ground_truth', 'extra_info')
_TRUTHS = ('answer', 'ground_truth', 'solution', 'target', 'label')  # columns in data for TRL
_TRL = ('prompts', 'completions', 'question', 'answers', *_TRUTHS)
# Parameters of other libraries, and what a wrapper would give for them.
_FOREIGN = {
    'data_source': 'task.dataset',
    'solution_str': 'transcript',
    'extra_info': '{}',
    **dict.fromkeys(('prompt', 'question', 'query'), 'task.question'),
    **dict.fromkeys(('prompts', 'questions', 'queries'), '[task.question]'),
    **dict.fromkeys(
        ('completion', 'response', 'solution', 'output', 'prediction', 'generation'), 'transcript'
    ),
    **dict.fromkeys(('completions', 'responses', 'solutions', 'outputs'), '[transcript]'),
    **dict.fromkeys(
        ('ground_truth', 'gold', 'label', 'target', 'reference', 'gold_answer', 'expected'),
        'task.answers[0]',
    ),
    **dict.fromkeys(('golds', 'ground_truths', 'gold_answers', 'targets'), 'task.answers'),
    **dict.fromkeys(('labels', 'references'), '[task.answers[0]]'),
    **dict.fromkeys(('sample', 'samples', 'state', 'trainer_state'), 'None'),
}
# The foreign names that may stand for ours, with the positions that they then have.
_MAY_BE_OURS = {
    **dict.fromkeys(('question', 'query', 'state'), (0,)),
    **dict.fromkeys(('response', 'solution'), (1, 2)),
}


class CustomReward:
  """A user's reward function, called as (task, answer, transcript).

  When a server that it calls cannot be reached, the call waits and tries again. Raises a RunError
  after `max_outage_s` seconds of this, and RewardError for all other errors.

  Choice: a call that fails alone, while another answer can be scored, is a separate error, as
  with a judge that fails on one answer.
  """

  def __init__(
      self,
      name: str,  # config.env.reward
      function: Callable[..., object],
      max_outage_s: float,
      clock: Callable[[], float] = time.monotonic,
      have_several: Callable[[], bool] = lambda: False,  # whether a task has several answers
  ):
    self.__qualname__ = name
    self._name = name
    self._function = _adapt(name, function, functools.cache(have_several))
    self._max_outage_s = max_outage_s
    self._clock = clock
    self._last_scored: tuple[types.Task, str, str] | None = None
    self._is_down = False  # a warning was logged, and no call has succeeded since

  def __call__(self, task: types.Task, answer: str, transcript: str) -> rewards.Score:
    started = self._clock()
    wait_s = _FIRST_WAIT_S
    num_failed = 0
    while True:
      try:
        score = self._score(task, answer, transcript)
      except (types.UserError, types.RunError, types.Stopped):
        raise
      except Exception as error:  # a user's code may raise anything
        num_failed += 1
        text = ' '.join(f'{type(error).__name__}: {error}'.split())[:300]
        if not outages.is_outage(error) or (num_failed >= _TRIES and self._works()):
          place = plugins.raised_at(error)
          raise rewards.RewardError(f'the reward {self._name!r} raised {text} ({place})') from error
        self._wait(text, wait_s, started)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        continue
      self._last_scored = task, answer, transcript
      if self._is_down:
        self._is_down = False
        logging.info('the reward %r answers again', self._name)
      return score

  def _score(self, task, answer, transcript):
    value = self._function(task, answer, transcript)
    if inspect.isawaitable(value):
      value = _wait_for(value)
    return rewards.read_score(self._name, value, task, answer)

  def _works(self):
    """Returns whether the reward scores an answer again that it has scored before."""
    if self._last_scored is None:
      return False
    try:
      self._score(*self._last_scored)
    except Exception:  # it does not work, for whatever reason
      return False
    return True

  def _wait(self, text, wait_s, started):
    left_s = self._max_outage_s - (self._clock() - started)
    setting = f'config.retriever.max_outage_s={self._max_outage_s:g}'
    if left_s <= 0:
      raise types.RunError(
          f'the reward {self._name!r} could not be had within {setting} ({text}): fix it, and the '
          'same command resumes'
      )
    if not self._is_down:
      self._is_down = True
      logging.warning(
          'the reward %r cannot be had (%s): its episodes wait, and it is called again until '
          '%s has passed',
          self._name,
          text,
          setting,
      )
    guard.pause(min(wait_s, left_s))


def _adapt(
    name: str, function: Callable[..., object], have_several: Callable[[], bool]
) -> Callable[..., object]:
  """Returns a reward as a function (task, answer, transcript). UserError: it takes something else.

  The names of its parameters decide.
  """
  if inspect.isclass(function):
    raise types.UserError(
        f'config.env.reward={name!r} is a class: give a function, or an instance with __call__'
    )
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):  # a built-in function has none
    return function
  kinds = {parameter.kind for parameter in parameters.values()}
  takes_all = inspect.Parameter.VAR_KEYWORD in kinds
  names = [
      key
      for key, parameter in parameters.items()
      if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
  ]
  required = [key for key in names if parameters[key].default is inspect.Parameter.empty]
  if 'solution_str' in names and set(required) <= set(_VERL):
    logging.info(
        "config.env.reward=%r has verl's parameters: solution_str is the transcript, and "
        'ground_truth is the answer, or the list of answers if any task of the run has several',
        name,
    )
    return functools.partial(_call_verl, function, _VERL if takes_all else names, have_several)
  if 'completions' in names and set(required) <= set(_TRL):
    logging.info(
        "config.env.reward=%r has TRL's parameters: it gets lists of one element. completions "
        'holds the transcript as a text, and as a message only if the function raises a '
        'TypeError, AttributeError, KeyError or IndexError for the first text. A function for '
        'messages that raises none of them needs a wrapper',
        name,
    )
    return _TrlReward(name, function, names, takes_all, have_several)
  is_foreign = any(
      key in _FOREIGN and i not in _MAY_BE_OURS.get(key, ()) for i, key in enumerate(names)
  )
  if not is_foreign and set(required) <= set(_OURS) and set(names) & set(_OURS):
    keys = [key for key in _OURS if key in names]
    if len(keys) < len(_OURS) or names[: len(_OURS)] != list(_OURS):
      if not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        return lambda *values: function(
            **{key: value for key, value in zip(_OURS, values) if key in keys}
        )
  try:
    inspect.signature(function).bind(None, None, None)
  except TypeError:
    is_foreign = True
  # By position, a name of ours in another place, or `answer` beside names of other libraries, would
  # be given something else than its author means.
  for i, key in enumerate(names):
    is_foreign |= key in _OURS and i != _OURS.index(key)
  is_foreign |= 'answer' in names and not _FOREIGN.keys().isdisjoint(names)
  if is_foreign:
    raise _refusal(name, names, required)
  if names[: len(_OURS)] != list(_OURS):
    logging.info('config.env.reward=%r is called by position with (task, answer, transcript)', name)
  return function


def _refusal(name, names, required):
  """Returns the error of a function of another shape, with the wrapper that it needs."""
  arguments = []
  for key in required:
    value = _FOREIGN.get(key, key if key in _OURS else '...')
    if key == 'answer' and set(names) & _FOREIGN.keys():  # there, it is the right one
      value = 'task.answers[0]'
    arguments.append(f'{key}={value}')
  module, _, attribute = name.partition(':')
  return types.UserError(
      f'config.env.reward={name!r} takes ({", ".join(names)}), and a reward is called with (task, '
      'answer, transcript): write a function around it and name that one: '
      f'import {module}; def reward(task, answer, transcript): '
      f'return {module}.{attribute}({", ".join(arguments)})'
  )


def _ground_truth(task: types.Task, have_several: Callable[[], bool]) -> object:
  """Returns the answer of a task in verl's way: a text, or a list if any task has several."""
  return list(task.answers) if have_several() else task.answers[0]


def _call_verl(function, names, have_several, task, answer, transcript):
  del answer
  values = {
      'data_source': task.dataset,
      'solution_str': transcript,
      'ground_truth': _ground_truth(task, have_several),
      'extra_info': {
          'index': task.id,
          'question': task.question,
          'split': task.split,
          'options': dict(task.options),
          'letter': task.letter,
      },
  }
  return function(**{key: value for key, value in values.items() if key in names})


class _TrlReward:
  """A function with TRL's parameters, called with lists of one element.

  Completions are texts, TRL's standard format. A function that raises a TypeError, AttributeError,
  KeyError or IndexError for the first text, and no error for the message, gets messages from then
  on. A function that has scored a text is not given messages, whatever it raises later. Scores
  decide nothing: a length, for example, is a number for both.
  """

  def __init__(self, name, function, names, takes_all, have_several):
    self._name = name
    self._function = function
    self._names = names
    self._takes_all = takes_all
    self._have_several = have_several
    self._gives_messages: bool | None = None  # None: no call has succeeded yet

  def __call__(self, task: types.Task, answer: str, transcript: str) -> object:
    del answer
    columns = self._columns(task)
    if self._gives_messages is not None:
      return self._call(columns, task, transcript, self._gives_messages)
    try:
      score = self._call(columns, task, transcript, False)
      self._gives_messages = False
    except (TypeError, AttributeError, KeyError, IndexError) as error:
      try:
        score = self._call(columns, task, transcript, True)
      except types.Stopped:
        raise
      except Exception as messages_error:
        if outages.is_outage(messages_error):
          raise
        raise error from None  # the first error says more
      self._gives_messages = True
      text = f'{type(error).__name__}: {error}'
      logging.info('the reward %r gets messages: it raised %s for a text', self._name, text)
    return score

  def _columns(self, task):
    """Returns the columns by name, each with one element."""
    columns = dict.fromkeys(_TRUTHS, _ground_truth(task, self._have_several))
    columns |= {'answers': list(task.answers), 'question': task.question}
    columns |= {'options': dict(task.options), 'letter': task.letter}
    return {key: [value] for key, value in columns.items() if self._takes_all or key in self._names}

  def _call(self, columns, task, transcript, gives_messages):
    prompt: Any = task.question
    completion: Any = transcript
    if gives_messages:
      prompt = [{'role': 'user', 'content': prompt}]
      completion = [{'role': 'assistant', 'content': completion}]
    values = columns | {'completions': [completion]}
    if self._takes_all or 'prompts' in self._names:
      values['prompts'] = [prompt]
    value = self._function(**values)
    return self._first(_wait_for(value) if inspect.isawaitable(value) else value)

  def _first(self, values):
    """Returns the element of a list of one. UserError: it is something else.

    A list of two would be read as a number with its metrics.
    """
    if not isinstance(values, (str, Mapping)):
      with contextlib.suppress(TypeError, ValueError):
        (value,) = values
        return value
    raise types.UserError(
        f'the reward {self._name!r} gave {reprlib.repr(values)} for one completion: a list of one '
        'number is needed'
    )


class _Loop(threading.Thread):
  """An event loop in a separate thread, for clients that belong to one loop."""

  def __init__(self):
    super().__init__(daemon=True, name='rewards')
    self.loop = asyncio.new_event_loop()
    self.start()

  def run(self):
    asyncio.set_event_loop(self.loop)
    self.loop.run_forever()


_LOOPS: list[_Loop] = []  # the last one is used
_LOOPS_LOCK = threading.Lock()


def _wait_for(value: Awaitable[object]) -> object:
  """Returns the result of a coroutine. A loop that a call blocks is replaced."""
  has_started = threading.Event()

  async def run():
    has_started.set()
    return await value

  with _LOOPS_LOCK:
    if not _LOOPS:
      _LOOPS.append(_Loop())
    thread = _LOOPS[-1]
  future = asyncio.run_coroutine_threadsafe(run(), thread.loop)
  while not has_started.wait(_LOOP_S):
    future.cancel()
    with _LOOPS_LOCK:
      if _LOOPS[-1] is thread:
        _LOOPS.append(_Loop())
      thread = _LOOPS[-1]
    future = asyncio.run_coroutine_threadsafe(run(), thread.loop)
  return future.result()
