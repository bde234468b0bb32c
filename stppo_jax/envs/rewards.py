"""What an answer is worth: exact match, its looser kin, and the shape of the agent's text.

Plain strings in, floats out. The search environment chooses which of these is the reward.
"""

import collections
from collections.abc import Sequence
import re
import string

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
  """1.0 if the normalised prediction equals any normalised gold, else 0.0.

  Choice: golds of which normalisation leaves nothing (`A`, `The`, `+`) are compared as they
  stand, letter case aside; else an empty prediction would be right for each of them.
  """
  if prediction is None:
    return 0.0
  return float(any(_comparable(prediction) == _comparable(gold) for gold in _as_list(golds)))


def sub_exact_match(prediction: str | None, golds: Sequence[str]) -> float:
  """1.0 if any normalised gold is a substring of the normalised prediction, else 0.0."""
  if prediction is None:
    return 0.0
  within = normalize_answer(prediction)
  contained = any(
      normalize_answer(gold) and normalize_answer(gold) in within for gold in _as_list(golds)
  )
  return float(contained or exact_match(prediction, golds))


def f1(prediction: str | None, golds: Sequence[str]) -> float:
  """The best over the golds of 2 P R / (P + R), P and R counted over normalised words."""
  if prediction is None:
    return 0.0
  return max((_word_f1(prediction, gold) for gold in _as_list(golds)), default=0.0)


def extract_answer(text: str) -> str | None:
  """The stripped content of the first `<answer>..</answer>`, or None. `text` is the agent's own:
  neither the prompt nor an observation belongs in it."""
  content, closing, _ = text.partition('<answer>')[2].partition('</answer>')
  return content.strip() if closing else None


def well_formed(text: str) -> bool:
  """True if `text` is think (search information think)* answer, with balanced tags, no tag inside
  another, and nothing but white space between the blocks. `text` is the agent's text with the
  observations in between, without the prompt."""
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


def format_reward(correct: bool, formed: bool, answered: bool = True) -> float:
  """Correctness mixed with form, with the numbers of Search-R1 v0.3.

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
