"""reasoning-gym's tasks: `env.kind='reasoning_gym:chain_sum'`, any of its data sets.

An episode is one question and one answer, which the package scores from 0 to 1. Many data sets give
a part of the score to a text that contains the right answer among others. A policy learns to
exploit that, so `partial=False` rewards full scores only. `env.options` goes to the data set's
configuration, except for the parameters of ReasoningGymEnv.

Some data sets score an answer with Python's `eval` or SymPy's `parse_expr`, which calls it. The
policy writes the answer, so an answer is wrong here if it could call a function of Python, or if
its arithmetic could take for ever. See answer_text.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
import math
import re
import sys
from typing import Any

from absl import logging

from stppo_jax import types
from stppo_jax.envs import packages
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.envs.adapters import answer_text

# In the source of a data set. A fraction is computed from a text as an exact number.
_COMPUTES_TEXTS = re.compile(r'\b(?:eval|exec|parse_expr|sympify|Fraction)\(')
_NO_ANSWER = 'I do not know'
INSTRUCTIONS = '\nWrite the final answer between <answer> and </answer>.\n'


def make(name: str) -> Callable[..., object]:
  """Returns a function that makes environments of a data set. UserError: there is no such name."""
  kind = f'reasoning_gym:{name}'
  given = f'config.env.kind={kind!r}'
  factory = packages.import_package(given, 'reasoning_gym.factory', 'reasoning_gym')
  packages.import_package(given, 'reasoning_gym', 'reasoning_gym')  # registers the data sets
  packages.check_name(kind, name, factory.DATASETS)
  create = functools.partial(factory.create_dataset, name)
  return packages.adapt(ReasoningGymEnv, create, kind, name)


class ReasoningGymEnv(packages.PackageEnv):
  """One question of a data set. Metrics: the package's `score`; `solved`, 1 for a full score."""

  frame = 'inline'
  core_metrics = ('solved',)
  stops_in_thoughts = False

  @staticmethod
  def attributes(settings: Mapping[str, Any]) -> dict[str, object]:
    """Returns the stop strings; by default the end of the answer, if it is tagged."""
    default = _stop_strings(settings.get('tagged', True))
    return {'stop_strings': tuple(settings.get('stop_strings', default))}

  def __init__(
      self,
      task: types.Task,
      tagged: bool = True,  # the answer is between <answer> tags; False: it is the whole text
      instructions: str | None = None,  # after the question; None: asks for tags if `tagged`
      stop_strings: tuple[str, ...] | None = None,  # None: the end of the answer, if `tagged`
      partial: bool = True,  # the reward is the package's score; False: 1 or 0
      **options: Any,
  ):
    del task  # `reset` gets its seed
    if stop_strings is None:
      stop_strings = _stop_strings(tagged)
    if instructions is None:
      instructions = INSTRUCTIONS if tagged else ''
    self.stop_strings = tuple(stop_strings)
    self._options = options
    self._tagged = tagged
    self._partial = partial
    self._instructions = instructions

  def reset(self, seed: int | None = None) -> tuple[str, protocol.ResetInfo]:
    """Generates the question of a seed."""
    with packages.explain_errors(
        f'config.env.kind={self.kind!r} with options {self._options!r} gives no question',
        'change the options',
    ):
      self._dataset = self.construct(**self._options, seed=seed, size=1)
      self._entry = self._dataset[0]
    self._warn_of_free_scores()
    return f'{self._entry["question"]}{self._instructions}', {}

  def step(self, action: str) -> protocol.Step:
    """Scores the answer. If tags are asked for, a text without them is an invalid action."""
    answer = self._answer(action)
    score = self._score(answer)
    solved = float(score > 1 - 1e-6)
    info: protocol.StepInfo = {
        'action': 'invalid' if answer is None else 'answer',
        'metrics': {'solved': solved, 'score': score, 'answered': float(answer is not None)},
    }
    return '', score if self._partial else solved, True, False, info

  def _score(self, answer):
    """Returns the package's score, or 0 for an answer that is dangerous to compute."""
    if answer and _computes_texts(type(self._dataset).__module__):
      reason = None
      if answer_text.may_run_code(answer):
        reason = 'it could call a function'
      elif answer_text.may_be_large(answer):
        reason = 'its arithmetic could take for ever'
      if reason is not None:
        logging.log_first_n(
            logging.WARNING,
            '%s runs its answers as Python: %.80r is scored 0, because %s',
            1,
            self.kind,
            answer,
            reason,
        )
        return 0.0
    try:
      score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
      if not math.isfinite(score):
        raise ValueError(f'the score is {score}')
      return score
    except Exception as error:  # some data sets cannot parse every answer
      logging.log_first_n(
          logging.WARNING,
          '%s cannot read the answer %.80r (%s): it is scored 0, as are others like it',
          1,
          self.kind,
          answer,
          packages.describe(error),
      )
      return 0.0

  def _warn_of_free_scores(self):
    """Logs a warning if a text without an answer has the full score."""
    if self._score(_NO_ANSWER) > 1 - 1e-6:
      logging.log_first_n(
          logging.WARNING,
          '%s gives the full score to %r: its rewards do not tell right from wrong answers',
          1,
          self.kind,
          _NO_ANSWER,
      )

  def _answer(self, action):
    if self._tagged:
      return rewards.extract_answer(action)
    for stop_string in self.stop_strings:
      action = action.removesuffix(stop_string)
    return action.strip() or None


def _stop_strings(tagged):
  return ('</answer>',) if tagged else ()


@functools.cache
def _computes_texts(module_name: str) -> bool:
  """Returns whether a module of the package computes texts, most often as Python."""
  source = inspect.getsource(sys.modules[module_name])
  return _COMPUTES_TEXTS.search(source) is not None
