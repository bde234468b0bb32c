"""Scores of an answer: exact match, substring match, F1, and the format of the agent's text.

`config.env.reward` names one of REWARDS, or `module:attribute`. A reward is a function (task,
answer, transcript) -> float. The environment calls it once, with the answer that ended the episode
and the agent's text with the observations in between. An episode without an answer has reward 0.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import math
import re
import string

from stppo_jax import types

Reward = Callable[[types.Task, str, str], float]

_NO_TAG = r'(?:(?!</?(?:think|search|information|answer)>).)*+'
_THINK = rf'\s*<think>{_NO_TAG}</think>'
_LOOK_UP = rf'\s*<search>{_NO_TAG}</search>\s*<information>{_NO_TAG}</information>'
_ANSWER = rf'\s*<answer>{_NO_TAG}</answer>\s*'
_WELL_FORMED = re.compile(f'{_THINK}(?:{_LOOK_UP}{_THINK})*+{_ANSWER}', re.DOTALL)
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize_answer(text: str) -> str:
  """Lower-cases, then drops ASCII punctuation, then the articles, then folds white space.

  The order is that of the SQuAD evaluation: `The U.S.` -> `the us` -> `us`.
  """
  text = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns 1.0 if the normalised prediction equals any normalised gold, else 0.0.

  Choice: if normalisation leaves nothing of a gold (`A`, `The`, `+`), the texts are compared in
  lower case. Otherwise an empty prediction would be right for each of these golds.
  """
  if prediction is None:
    return 0.0
  return float(any(_comparable(prediction) == _comparable(gold) for gold in _as_list(golds)))


def sub_exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns 1.0 if any normalised gold is a substring of the normalised prediction, else 0.0."""
  if prediction is None:
    return 0.0
  within = normalize_answer(prediction)
  contained = any(
      normalize_answer(gold) and normalize_answer(gold) in within for gold in _as_list(golds)
  )
  return float(contained or exact_match(prediction, golds))


def f1(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns the best 2 P R / (P + R) over the golds, P and R counted over normalised words."""
  if prediction is None:
    return 0.0
  return max((_word_f1(prediction, gold) for gold in _as_list(golds)), default=0.0)


def extract_answer(text: str) -> str | None:
  """Returns the stripped content of the agent's first `<answer>..</answer>`, or None.

  Thoughts do not count, because a model may quote its instructions there.
  """
  after_thoughts = text.rpartition('</think>')[2]
  content, closing, _ = after_thoughts.partition('<answer>')[2].partition('</answer>')
  return content.strip() if closing else None


def well_formed(text: str) -> bool:
  """Returns whether `text` is think (search information think)* answer with balanced tags.

  No tag is inside another, and only white space is between the blocks. `text` is the agent's text
  with the observations in between, without the prompt.
  """
  return _WELL_FORMED.fullmatch(text) is not None


def format_reward(correct: bool, formed: bool, answered: bool = True) -> float:
  """Returns correctness mixed with form, with the numbers of Search-R1 v0.3.

            well-formed   ill-formed
  correct       1.0           0.8
  wrong         0.2           0.1
  no answer     0.0           0.0
  """
  if not answered:
    return 0.0
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
  golds = (dict(task.options)[task.letter],)
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
  is_right = exact_match(*resolve_choice(answer, task)) == 1.0
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


def score_answer(reward: Reward, task: types.Task, answer: str, transcript: str) -> float:
  """Returns the reward of an answer. UserError: the function returned no finite number."""
  value = reward(task, answer, transcript)
  try:
    number = float(value)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    name = getattr(reward, '__qualname__', type(reward).__qualname__)
    raise types.UserError(
        f'the reward {name!r} gave {value!r} for the answer {answer!r} to the task {task.id!r}: a '
        'finite number is needed'
    )
  return number


def _as_list(golds):
  return [golds] if isinstance(golds, str) else golds


def _comparable(text):
  normalized = normalize_answer(text)
  return (True, normalized) if normalized else (False, text.strip().lower())


def _word_f1(prediction, gold):
  words = normalize_answer(prediction).split()
  gold_words = normalize_answer(gold).split()
  if not words or not gold_words:
    return exact_match(prediction, [gold])
  common = collections.Counter(words) & collections.Counter(gold_words)
  return 2 * common.total() / (len(words) + len(gold_words))
