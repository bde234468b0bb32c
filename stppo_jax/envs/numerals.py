"""Numbers and signs in answers.

The normalisation of SQuAD and Search-R1 drops all punctuation. It was made for names, and takes 5
for -5, 12 for 1/2 and x2 for x^2. `number` reads an answer that is a number, and `spell_signs`
writes the signs of other answers as words, which the normalisation keeps.
"""

from collections.abc import Iterator
import fractions
import re

_DIGITS = r'(?:\d{1,3}(?:,\d{3})+|\d{1,100})'
_VALUE = rf'(?:{_DIGITS}(?:\.\d{{0,100}})?|\.\d{{1,100}})(?:/\d{{1,100}})?'
_CURRENCY = r'(?:\\?[$€£¥])?'
_NUMBER = re.compile(rf'{_CURRENCY} ?([+-]?) ?{_CURRENCY} ?({_VALUE}) ?(?:\\?%)?')
_MIXED = re.compile(r'([+-]?)(\d{1,100}) (\d{1,100}/\d{1,100})')
_IN_TEXT = re.compile(rf'(?<![\w.,/])[+-]?{_CURRENCY}{_VALUE}(?!\d)')
_LEADING_ZERO = re.compile(r'0[\d,]')
_LATEX_FRACTION = re.compile(r'\\[dt]?frac\{(\d+)\}\{(\d+)\}')
_LATEX_MATHS = re.compile(r'\$(.*)\$|\\\((.*)\\\)', re.DOTALL)
_AROUND = ' \t\n"\'`*_()[]{}:;,!?'  # quotes, brackets and emphasis around an answer
_DASHES = str.maketrans('−‐‑–', '----')

_THOUSANDS = re.compile(r'(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])')
_SIGNS = re.compile(r'( *)([-+*/^=<>#]+)( *)')
_BETWEEN_DIGITS = re.compile(r'(?<=\d)[.,:](?=\d)')
_LEADING_POINT = re.compile(r'(?<!\w)\.(?=\d)')
_WORDS = {
    '+': 'plus',
    '-': 'minus',
    '*': 'times',
    '/': 'over',
    '^': 'power',
    '=': 'equals',
    '<': 'less',
    '>': 'greater',
    '#': 'sharp',
    '.': 'point',
    ',': 'comma',
    ':': 'to',
}


def number(text: str) -> fractions.Fraction | None:
  """Returns the value of an answer that is a number, or None.

  A number may have a sign, thousands, a decimal point, a divisor, a currency and a percent sign.
  `$..$`, `\\(..\\)` and `\\frac{a}{b}` of LaTeX are read. Choice: a percent sign is a unit, so 50%
  is 50. Digits after a leading zero are a name, such as 007.
  """
  text = _bare(text)
  mixed = _MIXED.fullmatch(text)
  if mixed:
    sign, whole, part = mixed.groups()
    value = _value(part)
    return value if value is None else _signed(sign, int(whole) + value)
  match = _NUMBER.fullmatch(text)
  if not match:
    return None
  sign, digits = match.groups()
  value = _value(digits)
  return value if value is None else _signed(sign, value)


def numbers_in(text: str) -> Iterator[fractions.Fraction]:
  """Yields the values of the numbers within a text."""
  text = _LATEX_FRACTION.sub(r'\1/\2', text.translate(_DASHES))
  for match in _IN_TEXT.finditer(text):
    value = number(match[0])
    if value is not None:
      yield value


def spell_signs(text: str) -> str:
  """Returns a text with words for the signs that carry meaning: `x^2` -> `xpower2`.

  A sign counts beside a digit or a single letter, and punctuation between two digits, except for
  thousands. A hyphen between a letter and another character is no sign: `B-52`, `x-ray`.
  """
  text = _bare(text)
  text = _THOUSANDS.sub(lambda match: match[0].replace(',', ''), text)
  text = _SIGNS.sub(_spell, text)
  text = _BETWEEN_DIGITS.sub(lambda match: _WORDS[match[0]], text)
  return _LEADING_POINT.sub('0point', text)


def _bare(text):
  """Returns an answer without the characters around it, and with plain fractions and dashes."""
  text = _LATEX_FRACTION.sub(r'\1/\2', text.translate(_DASHES)).strip()
  maths = _LATEX_MATHS.fullmatch(text)
  if maths:
    text = maths[1] or maths[2] or ''
  return text.strip(_AROUND) or text


def _value(digits):
  """Returns the value of digits with a point and a divisor, or None."""
  dividend, _, divisor = digits.replace(',', '').partition('/')
  if _LEADING_ZERO.match(dividend) or _LEADING_ZERO.match(divisor):
    return None
  whole = fractions.Fraction(dividend.removesuffix('.'))
  if not divisor:
    return whole
  return whole / int(divisor) if int(divisor) else None


def _signed(sign, value):
  return -value if sign == '-' else value


def _spell(match):
  """Returns the signs of a match as words, or as they stand if they carry no meaning."""
  left_gap, signs, right_gap = match.groups()
  before = match.string[: match.start()]
  after = match.string[match.end() :]
  is_after_unit = _ends_with_unit(before)
  is_before_unit = _ends_with_unit(after[:2][::-1]) or after.startswith(('\\', '.'))
  is_joined = bool(before and after) and not left_gap and not right_gap
  is_prefix = not right_gap and (left_gap or not before or not before[-1].isalnum())
  if signs != '-':
    counts = is_after_unit or is_before_unit
  elif is_joined and before[-1].isalnum() and after[0].isalnum():
    counts = before[-1].isdigit() and after[0].isdigit()
  elif is_prefix:
    counts = is_before_unit
  elif left_gap and right_gap:
    counts = is_after_unit and is_before_unit
  else:
    counts = is_after_unit
  if not counts:
    return match[0]
  words = ''.join(_WORDS[sign] for sign in signs)
  return left_gap + words if signs == '-' and is_prefix else words


def _ends_with_unit(text):
  """Returns whether a text ends with a digit or with a single letter."""
  last = text[-1:]
  return last.isdigit() or (last.isalpha() and not text[-2:-1].isalpha())
