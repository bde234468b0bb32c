"""Scores of an answer: exact match, substring match, F1, and the format of the agent's text.

`exact_match`, `sub_exact_match` and `f1` are the functions of SQuAD and Search-R1. The rewards
`em`, `sub_em` and `f1` compare numbers as numbers and options by their letters. `search_r1` is
Search-R1's exact match.

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

from stppo_jax import types
from stppo_jax.data import scripts
from stppo_jax.envs import formulas
from stppo_jax.envs import numerals
from stppo_jax.text import thoughts

Reward = Callable[[types.Task, str, str], float]

_NO_TAG = r'(?:(?!</?(?:think|search|information|answer)>).)*+'
_THINK = rf'\s*<think>{_NO_TAG}</think>'
_LOOK_UP = rf'\s*<search>{_NO_TAG}</search>\s*<information>{_NO_TAG}</information>'
_ANSWER = rf'\s*<answer>{_NO_TAG}</answer>\s*'
_WELL_FORMED = re.compile(f'{_THINK}(?:{_LOOK_UP}{_THINK})*+{_ANSWER}', re.DOTALL)
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_LETTER = '[0-9a-z\u00df-\u058f]'  # in scripts whose words stand apart: Latin, Greek, Cyrillic
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
  lower case, without points around them. Otherwise an empty prediction would be right for each of
  these golds.
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


def same_answer(answer: str, gold: str) -> bool:
  """Returns whether an answer is right: equal as numbers if the gold is one, else as texts.

  Texts are normalised as in `exact_match`, but signs that carry meaning count, see numerals.py, and
  so do the groups of formulas, see formulas.py.
  """
  value = None if formulas.is_factorial(gold) else numerals.number(gold)
  if value is None:
    return _text_key(answer) == _text_key(gold) and not formulas.differ(answer, gold)
  currencies = {numerals.currency(answer), numerals.currency(gold)} - {''}
  return numerals.number(answer) == value and len(currencies) < 2


def chosen_letter(answer: str, task: types.Task) -> str | None:
  """Returns the letter of the option that an answer names, '' if it contradicts itself, or None.

  `B`, `b`, `(B)`, `B.` and `B) Paris` all name option B, the last only if B is Paris. A marked
  letter with another option's text contradicts itself, and one with any other text counts. The
  exact text of one option names it, also if it begins like a letter (`A. Lincoln`). An answer
  without a letter names the only option that is equal as an answer.
  """
  text = numerals.bare(answer)
  if text.upper() not in (letter.upper() for letter, _ in task.options):
    exact = _options_like(answer, task, numerals.unwrapped)
    if len(exact) == 1:
      return exact[0]
  for letter, _ in _options(task):
    # A number after a point is no option's text: `1.5` names no option 1.
    mark_or_end = r'([).:](?!\d)|\b)'
    match = re.fullmatch(rf'\(?{re.escape(letter)}{mark_or_end}\s*(.*)', text, re.I | re.S)
    if not match:
      continue
    mark, rest = match.groups()
    letters = _letters_of_text(rest, task)
    if not rest or letter in letters:
      return letter
    if mark and letters:
      return ''
    if mark and mark != '.':  # `A. Smith` is a name
      return letter
  letters = _letters_of_text(answer, task)
  if not letters:
    return None
  return letters[0] if len(letters) == 1 else ''


def _options(task: types.Task) -> list[tuple[str, str]]:
  """Returns the options of a task, without their letters if all texts begin with these."""
  texts = []
  for letter, text in task.options:
    label = re.match(rf'\(?{re.escape(letter)}[).:]\s*', text, re.IGNORECASE)
    if label is None or label.end() == len(text):
      return list(task.options)
    texts.append((letter, text[label.end() :]))
  return texts


def _letters_of_text(text: str, task: types.Task) -> list[str]:
  """Returns the letters of the options with this text: exactly, or else as an answer."""
  for key in (str.strip, _without_spaces, _answer_key):
    letters = _options_like(text, task, key)
    if letters:
      return letters
  return []


def _options_like(text: str, task: types.Task, key: Callable[[str], str]) -> list[str]:
  return [letter for letter, other in _options(task) if key(other) == key(text)]


def _of_answer(score: Callable[[str, Sequence[str]], float]) -> Reward:
  """Returns the reward that is the score of an answer."""

  def reward(task, answer, transcript):
    del transcript
    if not task.options:
      return score(answer, task.answers)
    letter = chosen_letter(answer, task)
    if letter is not None:
      return float(letter == task.letter)
    gold = dict(_options(task))[task.letter]
    # An option within another one is not chosen by a sentence about the other one.
    texts = [text for _, text in _options(task) if text != gold]
    longer = [text for text in texts if gold.lower() in text.lower()]
    if any(_sub_em(answer, [text]) for text in longer):
      return 0.0
    return score(answer, [gold])

  return reward


def _em(answer, golds):
  return float(any(same_answer(answer, gold) for gold in golds))


def _sub_em(answer, golds):
  """Returns 1.0 if the words of any gold are within the answer, also as a plural or possessive.

  Scripts without spaces or with attached particles have no limits of words.
  """
  if _em(answer, golds):
    return 1.0
  spelled = numerals.spell_signs(answer)
  words = f' {normalize_answer(spelled)} '
  parts = normalize_answer(re.sub('[-/]', ' ', spelled))  # from words such as `Paris-based`
  numbers = set(numerals.numbers_in(answer))
  for gold in golds:
    if _differs_in_groups(answer, gold):
      continue
    value = numerals.number(gold)
    text = normalize_answer(numerals.spell_signs(gold))
    if value is not None:
      is_within = value in numbers
    elif any(map(str.isdigit, text)) or len(text) == 1:
      is_within = f' {text} ' in words
    else:
      whole = f'(?<!{_LETTER}){re.escape(text)}s?(?!{_LETTER})'
      is_within = bool(text) and re.search(whole, words + parts) is not None
    if is_within:
      return 1.0
  return 0.0


def _f1(answer, golds):
  if _em(answer, golds):
    return 1.0
  others = [gold for gold in golds if not _differs_in_groups(answer, gold)]
  return f1(_words_of(answer), list(map(_words_of, others)))


def _words_of(text):
  return scripts.spaced(numerals.spell_signs(text))


def _differs_in_groups(answer, gold):
  """Returns whether an answer differs from a gold one in what the normalisation drops."""
  return _text_key(answer) == _text_key(gold) and formulas.differ(answer, gold)


def _format(task, answer, transcript):
  is_right = REWARDS['em'](task, answer, transcript) == 1.0
  return format_reward(is_right, well_formed(transcript))


REWARDS: dict[str, Reward] = {
    'em': _of_answer(_em),
    'sub_em': _of_answer(_sub_em),
    'f1': _of_answer(_f1),
    'format': _format,
    'search_r1': _of_answer(exact_match),
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


def read_score(name: str, value: object, task: types.Task, answer: str) -> Score:
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


def _answer_key(text):
  """Returns a value that is equal for answers that are equal."""
  value = numerals.number(text)
  return _text_key(text) if value is None else value


def _text_key(text):
  return _comparable(numerals.spell_signs(text))


def _without_spaces(text):
  return ''.join(text.lower().split())


def _comparable(text):
  normalized = normalize_answer(text)
  if normalized:
    return True, normalized
  plain = text.strip().lower()
  return False, plain.strip('.') or plain


def _word_f1(prediction, gold):
  words = normalize_answer(prediction).split()
  gold_words = normalize_answer(gold).split()
  if not words or not gold_words:
    return exact_match(prediction, [gold])
  common = collections.Counter(words) & collections.Counter(gold_words)
  total = len(words) + len(gold_words)
  return 2 * common.total() / total
