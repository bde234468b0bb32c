"""Scores of an answer: exact match, substring match, F1, and the format of the agent's text.

`config.env.reward` names one of REWARDS, or `module:attribute`. A reward is a function (task,
answer, transcript) -> float. It is called once, with the answer that ended the episode and the
agent's text with the observations in between. An episode without an answer has 0 and no call.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import math
import re
import string

from stppo_jax import types

Reward = Callable[[types.Task, str, str], float]

_TAG = re.compile(r'<(/?)(think|search|information|answer)>')
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_MAY_FOLLOW = {
    'start': ('think',),
    'think': ('search', 'answer'),
    'search': ('information',),
    'information': ('think',),
    'answer': (),
}


def normalize_answer(text: str) -> str:
  """Lower-cases, then drops ASCII punctuation, then the articles, then folds white space.

  The order is that of the SQuAD evaluation: `The U.S.` -> `the us` -> `us`.
  """
  text = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """Returns 1.0 if the normalised prediction equals any normalised gold, else 0.0.

  Choice: golds of which normalisation leaves nothing (`A`, `The`, `+`) are compared as they
  stand, letter case aside; else an empty prediction would be right for each of them.
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

  What is said in a thought does not count: a model may quote its instructions there.
  """
  spoken = text.rpartition('</think>')[2]
  content, closing, _ = spoken.partition('<answer>')[2].partition('</answer>')
  return content.strip() if closing else None


def well_formed(text: str) -> bool:
  """Returns whether `text` is think (search information think)* answer with balanced tags.

  No tag is inside another, and only white space is between the blocks. `text` is the agent's text
  with the observations in between, without the prompt.
  """
  previous, inside, end = 'start', None, 0
  for tag in _TAG.finditer(text):
    closing, name = tag.groups()
    if closing:
      if name != inside:
        return False
      previous, inside = name, None
    else:
      between = text[end : tag.start()]
      if inside or between.strip() or name not in _MAY_FOLLOW[previous]:
        return False
      inside = name
    end = tag.end()
  return previous == 'answer' and inside is None and not text[end:].strip()


def of_answer(reward: Callable, task: types.Task, answer: str, transcript: str) -> float:
  """Returns what a reward gives. UserError: no finite number."""
  given = reward(task, answer, transcript)
  try:
    number = float(given)
  except (TypeError, ValueError):
    number = math.nan
  if not math.isfinite(number):
    name = getattr(reward, '__qualname__', type(reward).__qualname__)
    raise types.UserError(
        f'the reward {name!r} gave {given!r} for the answer {answer!r} to the task {task.id!r}: a '
        'finite number is needed'
    )
  return number


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


def spelled_out(answer: str, task: types.Task) -> tuple[str, tuple[str, ...]]:
  """Returns (answer, golds), with a letter replaced by its option's text in multiple choice.

  `B`, `b`, `(B)`, `B.` and `B) Paris` all mean option B, the last only if B is Paris; a marked
  letter with another option's text answers nothing. Letters are looked at first since answer
  normalisation, made for words, would drop `A` as an article.
  """
  if not task.options:
    return answer, task.answers
  golds = (dict(task.options)[task.letter],)
  texts = [text for _, text in task.options]
  for letter, text in task.options:
    named = re.fullmatch(rf'\(?{re.escape(letter)}([).:]|\b)\s*(.*)', answer, re.I | re.S)
    if not named:
      continue
    mark, rest = named.groups()
    if not rest or exact_match(rest, [text]):
      return text, golds
    if mark and exact_match(rest, texts):
      return '', golds
  return answer, golds


def _em(task, answer, transcript):
  del transcript
  return exact_match(*spelled_out(answer, task))


def _sub_em(task, answer, transcript):
  del transcript
  prediction, golds = spelled_out(answer, task)
  return max(exact_match(prediction, golds), sub_exact_match(prediction, golds))


def _f1(task, answer, transcript):
  del transcript
  return f1(*spelled_out(answer, task))


def _format(task, answer, transcript):
  return format_reward(_em(task, answer, transcript) == 1.0, well_formed(transcript))


REWARDS: dict[str, Reward] = {'em': _em, 'sub_em': _sub_em, 'f1': _f1, 'format': _format}


SCORES = ('em', 'f1', 'sub_em')  # those of REWARDS that need the answer alone


def scores(task: types.Task, answer: str) -> dict[str, float]:
  """Returns all SCORES of an answer. `sub_em` is the accuracy of answers that are sentences."""
  return {name: REWARDS[name](task, answer, '') for name in SCORES}


def _as_list(golds: Sequence[str]) -> Sequence[str]:
  return [golds] if isinstance(golds, str) else golds


def _comparable(text: str) -> tuple[bool, str]:
  normalized = normalize_answer(text)
  return (True, normalized) if normalized else (False, text.strip().lower())


def _word_f1(prediction: str, gold: str) -> float:
  ours, theirs = normalize_answer(prediction).split(), normalize_answer(gold).split()
  if not ours or not theirs:
    return exact_match(prediction, [gold])
  common = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
  return 2 * common / (len(ours) + len(theirs))
