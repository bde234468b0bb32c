"""reasoning-gym's tasks: `env.kind='reasoning_gym:chain_sum'`, any of its data sets.

One question, one answer, scored from 0 to 1 by the package. Many data sets pay a part for a text
that contains the right answer among others, which a policy learns to exploit: `partial=False` pays
for whole scores only. `env.options` goes to the data set's
configuration, except for the parameters of ReasoningGymEnv.
"""

from collections.abc import Mapping
import functools
from typing import Any

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards

INSTRUCTIONS = '\nWrite the final answer between <answer> and </answer>.\n'


def make(name: str) -> Any:
  """Returns what makes an environment of a data set. UserError: there is none of that name."""
  kind = f'reasoning_gym:{name}'
  factory = protocol.import_peer(kind, 'reasoning_gym.factory', 'reasoning_gym')
  protocol.import_peer(kind, 'reasoning_gym', 'reasoning_gym')  # registers the data sets
  if name not in factory.DATASETS:
    raise protocol.unknown_name(kind, name, factory.DATASETS)
  create = functools.partial(factory.create_dataset, name)
  made: Any = functools.partial(ReasoningGymEnv, create, kind)
  made.core_metrics = ReasoningGymEnv.core_metrics
  made.attributes = attributes
  made.load_tasks = functools.partial(protocol.seed_tasks, name)
  return made


def attributes(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the stop strings: the end of the answer, if it is tagged, unless others are given."""
  tagged = ('</answer>',) if settings.get('tagged', True) else ()
  return {'stop_strings': tuple(settings.get('stop_strings', tagged))}


class ReasoningGymEnv:
  """One question of a data set, made by the seed. `score` is the package's, `solved` is 1 at 1."""

  frame = 'inline'
  core_metrics = ('solved',)

  def __init__(
      self,
      create: Any,
      kind: str,
      task: types.Task,
      tagged: bool = True,  # the answer is between <answer> tags; False: it is the whole text
      instructions: str | None = None,  # after the question; None: those for a tagged answer, or ''
      stop_strings: tuple[str, ...] | None = None,  # they are no part of an answer
      partial: bool = True,  # the reward is the package's score; False: 1 or 0
      **options: Any,
  ):
    del task
    self.stop_strings = (('</answer>',) if tagged else ()) if stop_strings is None else stop_strings
    self.stop_strings = tuple(self.stop_strings)
    self._create = functools.partial(create, **options)
    self._given = f'config.env.kind={kind!r} with options {options!r}'
    self._tagged, self._partial = tagged, partial
    self._instructions = instructions
    if instructions is None:
      self._instructions = INSTRUCTIONS if tagged else ''
    self._dataset: Any = None
    self._entry: dict[str, Any] = {}

  def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
    """Makes the question of a seed."""
    try:
      self._dataset = self._create(seed=seed, size=1)
      self._entry = self._dataset[0]
    except Exception as error:  # another package's: its checks of the options are assertions
      raise types.UserError(
          f'{self._given} gives no question ({type(error).__name__}: '
          f'{" ".join(str(error).split())[:200]}): change the options'
      ) from error
    return f'{self._entry["question"]}{self._instructions}', {}

  def step(self, action: str) -> protocol.Step:
    """Scores the answer. One without tags, where they are asked for, is an invalid action."""
    answer = self._answer(action)
    score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
    solved = float(score > 1 - 1e-6)
    metrics = {'solved': solved, 'score': score, 'answered': float(answer is not None)}
    info = {'action': 'invalid' if answer is None else 'answer', 'metrics': metrics}
    return '', score if self._partial else solved, True, False, info

  def _answer(self, action):
    if self._tagged:
      return rewards.extract_answer(action)
    for end in self.stop_strings:
      action = action.removesuffix(end)
    return action.strip() or None
