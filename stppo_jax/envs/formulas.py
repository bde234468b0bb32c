"""Grouping, ends of intervals and factorials in answers that are formulas.

The normalisation of answers drops brackets, so 2^{n-1} would equal 2^n-1. `differ` compares what it
drops. Two texts that are equal otherwise differ if both are formulas and their groups differ.
"""

import re

from stppo_jax.envs import numerals

_COMMAND = re.compile(r'\\[a-zA-Z]+')
_TEXT = re.compile(r'\\(?:text|mathrm|mbox|operatorname)\b')
_LONG_WORD = re.compile(r'[^\W\d_]{4}')
_WORD = re.compile(r'[^\W\d_]{2}')
_SPACE = re.compile(r'\s+')
_ATOM = re.compile(r'[+-]?(?:\d+(?:\.\d+)?|[^\W\d_]|\\[a-zA-Z]+)')
_PRODUCT = re.compile(r'(?:[^\W_]|\\[a-zA-Z]+)+')
_SIGNS = '+-*/^'
_MARKS = frozenset('+*/^=')  # a text with one of them may have products such as xy
_LONGEST_ATOM = 24  # characters of a group that is looked at
_OPENING = '([{'
_CLOSING = ')]}'
_FACTORIAL = re.compile(r'\d+!')
_INFINITY = re.compile(r'\\infty|\b(?:infinity|inf|oo)\b', re.IGNORECASE)
_INTERVAL = re.compile(r'([(\[])([^()\[\],]*),([^()\[\],]*)([)\]])')


def differ(answer: str, gold: str) -> bool:
  """Returns whether two answers that are equal without punctuation differ as formulas.

  Brackets count, unless they hold one number, letter or command, or are around the whole. Round
  ones around a product count behind ^, _ and /, and before a power. A factorial counts if the gold
  answer has it. The ends of intervals count if both have intervals, such as `[0,1)`.
  """
  ends = _ends_of_intervals(answer)
  gold_ends = _ends_of_intervals(gold)
  if ends and gold_ends:
    return ends != gold_ends
  groups = _groups(answer)
  gold_groups = _groups(gold)
  if groups is None or gold_groups is None:
    return False
  if '!' not in gold_groups:  # `42!` may be an exclamation
    groups = groups.replace('!', '')
  return groups != gold_groups


def is_factorial(text: str) -> bool:
  """Returns whether a text is a number with an exclamation mark, such as 10!."""
  return _FACTORIAL.fullmatch(numerals.unwrapped(text)) is not None


def _ends_of_intervals(text: str) -> list[tuple[str, str]]:
  """Returns the kinds of the ends of all intervals of numbers or letters in a text."""
  text = _SPACE.sub('', numerals.unwrapped(text))
  ends = []
  for match in _INTERVAL.finditer(text):
    opening, low, high, closing = match.groups()
    limits = _COMMAND.sub('', _INFINITY.sub('', f'{low},{high}'))
    if not _WORD.search(limits):
      ends.append((opening, closing))
  return ends


def _groups(text: str) -> str | None:
  """Returns a formula without brackets that have no meaning; None: the text is no formula.

  A text with words is none, and neither is one whose brackets do not match. The time is linear.
  """
  text = _SPACE.sub('', numerals.unwrapped(text))
  rest = _COMMAND.sub(' ', text)
  is_marked = rest != text or not _MARKS.isdisjoint(text)
  if _TEXT.search(text) or _LONG_WORD.search(rest) or (_WORD.search(rest) and not is_marked):
    return None
  text = text.replace(r'\{', '{').replace(r'\}', '}')
  partners: dict[int, int] = {}  # place of an opening bracket -> place of its closing one
  opened = []
  for place, character in enumerate(text):
    if character in _OPENING:
      opened.append(place)
    elif character in _CLOSING:
      if not opened:
        return None
      partners[opened.pop()] = place
  if opened:
    return None
  left_out = set()
  for start, end in partners.items():
    if _has_no_meaning(text, partners, start, end):
      left_out |= {start, end}
  brackets = {*partners, *partners.values()} - left_out
  kept = []
  for place, character in enumerate(text):
    if character in _OPENING + _CLOSING:
      if place in brackets:
        kept.append('(' if character in _OPENING else ')')
    elif character.isalnum() or character == '!':
      kept.append(character.lower())
    elif character in _SIGNS:
      # Others count already, see numerals.spell_signs.
      if {place - 1, place + 1} & brackets:
        kept.append(character)
  return ''.join(kept)


def _has_no_meaning(text, partners, start, end):
  """Returns whether the brackets at two places of a formula may be left out."""
  is_whole = start == 0 and end == len(text) - 1
  is_twice = partners.get(start + 1) == end - 1
  if is_whole or is_twice:
    return True
  if end - start > _LONGEST_ATOM:
    return False
  content = text[start + 1 : end]
  if _ATOM.fullmatch(content):
    return True
  is_factor = text[start - 1 : start] not in ('^', '_', '/') and text[end + 1 : end + 2] != '^'
  return text[start] == '(' and is_factor and _PRODUCT.fullmatch(content) is not None
