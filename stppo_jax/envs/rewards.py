"""Scores of an answer: exact match, substring match, F1, and the format of the agent's text.

`config.env.reward` names one of REWARDS, or `module:attribute`. A reward is a function (task,
answer, transcript) -> float. The environment calls it once, with the answer that ended the episode
and the agent's text with the observations in between. An episode without an answer has reward 0.
custom_rewards.py calls the functions of users.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import math
import re
import string
from typing import Any
import unicodedata

from stppo_jax import thoughts
from stppo_jax import types

Reward = Callable[[types.Task, str, str], float]

_NO_TAG = r'(?:(?!</?(?:think|search|information|answer)>).)*+'
_THINK = rf'\s*<think>{_NO_TAG}</think>'
_LOOK_UP = rf'\s*<search>{_NO_TAG}</search>\s*<information>{_NO_TAG}</information>'
_ANSWER = rf'\s*<answer>{_NO_TAG}</answer>\s*'
_WELL_FORMED = re.compile(f'{_THINK}(?:{_LOOK_UP}{_THINK})*+{_ANSWER}', re.DOTALL)
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_NO_WIDTH = dict.fromkeys((0x00AD, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF))
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize_answer(text: str) -> str:
  """Lower-cases, then drops ASCII punctuation, then the articles, then folds white space.

  The order is that of the SQuAD evaluation: `The U.S.` -> `the us` -> `us`. Choice: the two ways of
  Unicode to write an accented letter are equal, and characters without a width do not count.
  """
  if not text.isascii():
    text = unicodedata.normalize('NFC', text).translate(_NO_WIDTH)
  text = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns 1.0 if the normalised prediction equals any normalised gold, else 0.0.

  Choice: if normalisation leaves nothing of a gold (`A`, `The`, `+`), the texts are compared in
  lower case. Otherwise an empty prediction would be right for each of these golds.
  """
  if prediction is None:
    return 0.0
  comparable_golds = map(_comparable, _as_list(golds))
  return float(_comparable(prediction) in comparable_golds)


def sub_exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns 1.0 if any normalised gold is a substring of the normalised prediction, else 0.0."""
  if prediction is None:
    return 0.0
  within = normalize_answer(prediction)
  texts = filter(None, map(normalize_answer, _as_list(golds)))
  if any(text in within for text in texts):
    return 1.0
  return exact_match(prediction, golds)


def f1(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns the best 2 P R / (P + R) over the golds, P and R counted over normalised words."""
  if prediction is None:
    return 0.0
  scores_of_golds = [_word_f1(prediction, gold) for gold in _as_list(golds)]
  return max(scores_of_golds, default=0.0)


def extract_answer(text: str) -> str | None:
  """Returns the stripped content of the agent's first `<answer>..</answer>`, or None.

  Thoughts do not count, because a model may quote its instructions there.
  """
  after_tag = thoughts.outside(text).partition('<answer>')[2]
  content, closing, _ = after_tag.partition('</answer>')
  return content.strip() if closing else None


def well_formed(text: str) -> bool:
  """Returns whether `text` is think (search information think)* answer with balanced tags.

  No tag is inside another, and only white space is between the blocks. `text` is the agent's text
  with the observations in between, without the prompt.
  """
  return _WELL_FORMED.fullmatch(text) is not None


def format_reward(correct: bool, formed: bool) -> float:
  """Returns correctness mixed with form, with the numbers of Search-R1 v0.3.

            well-formed   ill-formed
  correct       1.0           0.8
  wrong         0.2           0.1
  """
  if correct:
    return 1.0 if formed else 0.8
  return 0.2 if formed else 0.1


def resolve_choice(answer: str, task: types.Task) -> tuple[str, tuple[str, ...]]:
  """Returns (answer, golds). In multiple choice, a letter is replaced by its option's text.

  `B`, `b`, `(B)`, `B.` and `B) Paris` all mean option B, the last only if B is Paris. A marked
  letter with another option's text is no answer. Letters come first because the normalisation of
  answers, made for words, would drop `A` as an article.
  """
  if not task.options:
    return answer, task.answers
  text_by_letter = dict(task.options)
  golds = (text_by_letter[task.letter],)
  texts = [text for _, text in task.options]
  for letter, text in task.options:
    match = re.fullmatch(rf'\(?{re.escape(letter)}([).:]|\b)\s*(.*)', answer, re.I | re.S)
    if not match:
      continue
    mark, rest = match.groups()
    if not rest or exact_match(rest, [text]):
      return text, golds
    if mark and exact_match(rest, texts):
      return '', golds
  return answer, golds


def _of_answer(score: Callable[..., float]) -> Reward:
  """Returns the reward that is the score of an answer."""
  return lambda task, answer, transcript: score(*resolve_choice(answer, task))


def _format(task, answer, transcript):
  is_right = REWARDS['em'](task, answer, transcript) == 1.0
  return format_reward(is_right, well_formed(transcript))


REWARDS: dict[str, Reward] = {
    'em': _of_answer(exact_match),
    'sub_em': _of_answer(sub_exact_match),
    'f1': _of_answer(f1),
    'format': _format,
}
SCORES = ('em', 'f1', 'sub_em')  # need the answer alone


def scores(task: types.Task, answer: str) -> dict[str, float]:
  """Returns all SCORES of an answer. `sub_em` is the accuracy of answers that are sentences."""
  return {name: REWARDS[name](task, answer, '') for name in SCORES}


class RewardError(Exception):
  """A reward raised an error; the message names the reward."""


class Score(float):
  """A reward, and the metrics that its function returned with it."""

  metrics: dict[str, float] = {}


def read_score(name: str, value: Any, task: types.Task, answer: str) -> Score:
  """Returns the value of a reward: a number, {'score': number, ..} or (number, metrics).

  Metrics that are finite numbers are kept, as 'reward/NAME'. UserError: there is no finite number.
  """
  if isinstance(value, Score):
    return value
  number = value
  metrics: Mapping[str, Any] = {}
  if isinstance(value, Mapping):
    metrics = value
    key = 'score' if 'score' in value else 'reward'
    number = value.get(key)
    metrics = {other: metric for other, metric in value.items() if other != key}
  elif isinstance(value, (tuple, list)) and len(value) == 2:
    number, second = value
    metrics = second if isinstance(second, Mapping) else {'second': second}
  score = _finite(number)
  if score is None:
    raise types.UserError(
        f'the reward {name!r} gave {value!r} for the answer {answer!r} to the task {task.id!r}: a '
        "finite number is needed, or {'score': number}, or (number, metrics)"
    )
  result = Score(score)
  numbers = {f'reward/{key}': _finite(metric) for key, metric in metrics.items()}
  result.metrics = {key: metric for key, metric in numbers.items() if metric is not None}
  return result


def score_answer(reward: Reward, task: types.Task, answer: str, transcript: str) -> Score:
  """Returns the reward of an answer. UserError: the function returned no finite number."""
  value = reward(task, answer, transcript)
  name = getattr(reward, '__qualname__', type(reward).__qualname__)
  return read_score(name, value, task, answer)


def _finite(value: Any) -> float | None:
  """Returns a number of Python, NumPy or another library as a float; None if it is none."""
  with contextlib.suppress(TypeError, ValueError, AttributeError, RuntimeError):
    number = float(value.item() if hasattr(value, 'item') else value)
    if math.isfinite(number):
      return number
  return None


def _as_list(golds):
  return [golds] if isinstance(golds, str) else golds


def _comparable(text):
  normalized = normalize_answer(text)
  if normalized:
    return True, normalized
  return False, text.strip().lower()


def _word_f1(prediction, gold):
  words = normalize_answer(prediction).split()
  gold_words = normalize_answer(gold).split()
  if not words or not gold_words:
    return exact_match(prediction, [gold])
  common = collections.Counter(words) & collections.Counter(gold_words)
  total = len(words) + len(gold_words)
  return 2 * common.total() / total
