"""Numbers and signs in answers.

The normalisation of SQuAD and Search-R1 drops all punctuation. It was made for names, and takes 5
for -5, 12 for 1/2 and x2 for x^2. `number` reads an answer that is a number, and `spell_signs`
writes the signs of other answers as words, which the normalisation keeps.
"""

from collections.abc import Iterator
import fractions
import re

_DIGITS = r'(?:\d{1,3}(?:,\d{3})+|\d{1,100})'
_EXPONENT = r'(?:[eE][+-]?\d{1,2}(?!\d))'
_VALUE = rf'(?:{_DIGITS}(?:\.\d{{0,100}})?|\.\d{{1,100}})(?:{_EXPONENT}|/\d{{1,100}})?'
_CURRENCY = r'(?:\\?[$€£¥])?'
_SIGN_OF_CURRENCY = re.compile('[$€£¥]')
_NUMBER = re.compile(rf'{_CURRENCY} ?([+-]?) ?{_CURRENCY} ?({_VALUE}) ?(?:\\?%)?')
_MIXED = re.compile(r'([+-]?)(\d{1,100}) (\d{1,100}/\d{1,100})')
_IN_TEXT = re.compile(rf'(?<![\w.,/])[+-]?{_CURRENCY}{_VALUE}(?!\d)')
_LEADING_ZERO = re.compile(r'0[\d,]')
_LATEX_FRACTION = re.compile(r'\\[dt]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))')
_LATEX_DISPLAY = re.compile(r'\\[dt]frac(?![a-zA-Z])')
_LATEX_SIZE = re.compile(r'\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])')
_LATEX_POWER = re.compile(r'([\^_])\{([+-]?(?:\d+|[^\W\d_]))\}')
_LATEX_TEXT = re.compile(r'\\(?:text|mathrm|mbox)\{([^{}]*)\}')
_LATEX_SPACE = re.compile(r'\\[,!;:]|(?<=[\w)}\]]) +(?=\\[a-zA-Z])')
_LATEX_COMMAND = re.compile(r'(\\[a-zA-Z]+)(?: +(?=[^a-zA-Z ]))?')
_DEGREES = re.compile(r' ?(?:°|\^\{?\\circ\}?)$')
# Maths and a box of LaTeX, and emphasis of Markdown.
_WRAPPED = re.compile(
    r'\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\boxed\{(.*)\}|\*(.*)\*|_(.*)_|`(.*)`', re.DOTALL
)
_MOST_WRAPS = 8
_AROUND = ' \t\n"\'()[]{}:;,!?'  # quotes and brackets around an answer
_CHARACTERS = str.maketrans(
    {**dict.fromkeys('−‐‑–', '-'), **dict.fromkeys('‘’', "'"), **dict.fromkeys('“”', '"')}
    | dict(zip('₀₁₂₃₄₅₆₇₈₉', '0123456789'))
    | {0xFEE0 + code: chr(code) for code in range(ord('!'), 0x7F)}  # full-width ASCII
    | dict(zip(map(ord, '。、・'), '.,·'))
    | dict.fromkeys(map(ord, '「」『』《》〈〉【】〔〕'), '"')
    | {'½': ' 1/2', '⅓': ' 1/3', '⅔': ' 2/3', '¼': ' 1/4', '¾': ' 3/4', '⅕': ' 1/5', '⅛': ' 1/8'}
)

_THOUSANDS = re.compile(r'(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])')
_SIGNS = re.compile('( ?)([-+*/^=<>#&|~]+)( ?)')
_SYMBOL = re.compile(r'(?<![^\W\d_])[A-Z][A-Za-z]$')  # an element, a blood group
_BETWEEN_DIGITS = re.compile(r'(?<=\d)[.,:](?=\d)')
_WORD = re.compile(r'[^\W\d_]{2}')
_SEPARATORS = re.compile(' ?([,;:]) ?')
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
    ';': 'comma',
    '&': 'and',
    '|': 'or',
    '~': 'not',
    ':': 'to',
}


def number(text: str) -> fractions.Fraction | None:
  """Returns the value of an answer that is a number, or None.

  A number may have a sign, thousands, a decimal point, a divisor, a currency and a percent sign.
  `$..$`, `\\(..\\)`, `\\boxed{..}` and `\\frac{a}{b}` of LaTeX are read. Choice: a percent sign is
  a unit, so 50% is 50. Digits after a leading zero are a name, such as 007.
  """
  text = _DEGREES.sub('', bare(text))
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


def currency(text: str) -> str:
  """Returns the sign of the currency of an answer; empty: it has none."""
  match = _SIGN_OF_CURRENCY.search(bare(text))
  return match[0] if match else ''


def numbers_in(text: str) -> Iterator[fractions.Fraction]:
  """Yields the values of the numbers within a text."""
  text = _plain(text)
  for match in _IN_TEXT.finditer(text):
    value = number(match[0])
    if value is not None:
      yield value


def spell_signs(text: str) -> str:
  """Returns a text with words for the signs that carry meaning: `x^2` -> `xpower2`.

  A sign counts beside a digit, a single letter or a symbol such as Na, and so does a minus directly
  before a text. A hyphen between a letter and another character is no sign: `B-52`, `x-ray`. Only
  small letters that stand alone are subtracted: `x-y`, `n-1`. Punctuation counts between two
  digits, except for thousands, and in a text without words: `(1, -2)`.
  """
  text = ' '.join(bare(text).split())
  text = _THOUSANDS.sub(lambda match: match[0].replace(',', ''), text)
  if not _WORD.search(_LATEX_COMMAND.sub('', text)):
    text = _SEPARATORS.sub(lambda match: f' {_WORDS[match[1]]} ', text)
  text = _SIGNS.sub(_spell, text)
  text = _BETWEEN_DIGITS.sub(lambda match: _WORDS[match[0]], text)
  return _LEADING_POINT.sub('0point', text)


def bare(text: str) -> str:
  """Returns an answer without the characters around it, and with plain fractions and dashes."""
  return _unwrapped(_plain(text), _AROUND)


def unwrapped(text: str) -> str:
  """Returns an answer as `bare` does, with the quotes and brackets around it."""
  return _unwrapped(_plain(text), ' \t\n.')


def _unwrapped(text, around):
  for _ in range(_MOST_WRAPS):
    wrapped = _WRAPPED.fullmatch(text.rstrip('.')) or _WRAPPED.fullmatch(text)
    inner = ''.join(wrapped.groups('')) if wrapped else text.strip(around)
    if not inner or inner == text:
      break
    text = inner
  return text


def _plain(text):
  """Returns a text with plain dashes, quotes, digits and fractions, and without LaTeX's spaces."""
  text = text.translate(_CHARACTERS).replace('{,}', ',')
  text = _LATEX_SIZE.sub('', _LATEX_TEXT.sub(r'\1', text))
  text = _LATEX_COMMAND.sub(r'\1', _LATEX_SPACE.sub('', text))
  text = _LATEX_POWER.sub(r'\1\2', text)
  text = _LATEX_FRACTION.sub(_fraction, text)
  return _LATEX_DISPLAY.sub(r'\\frac', text).strip()


def _fraction(match):
  """Returns a fraction of LaTeX as text, behind a space if it is the part of a mixed number."""
  numerator, denominator = filter(None, match.groups())
  before = match.string[match.start() - 1 : match.start()] if match.start() else ''
  gap = ' ' if before.isdigit() else ''
  return f'{gap}{numerator}/{denominator}'


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
  start, end = match.span()
  before = match.string[max(0, start - 3) : start]
  after = match.string[end : end + 3]
  is_after_unit = _ends_with_unit(before) or bool(_SYMBOL.search(before))
  is_before_unit = _ends_with_unit(after[:2][::-1]) or after.startswith(('\\', '.'))
  is_joined = bool(before and after) and not left_gap and not right_gap
  is_prefix = not right_gap and (left_gap or not before or not before[-1].isalnum())
  if signs != '-':
    counts = is_after_unit or is_before_unit
  elif is_joined and before[-1].isalnum() and after[0].isalnum():
    counts = before[-1].isdigit() and after[0].isdigit() or _is_difference(before, after)
  elif is_prefix:
    counts = is_before_unit or not right_gap and not (before and before[-1].isalnum())
  elif left_gap and right_gap:
    counts = is_after_unit and is_before_unit
  else:
    counts = is_after_unit
  if not counts:
    return match[0]
  words = ''.join(_WORDS[sign] for sign in signs)
  return left_gap + words if signs == '-' and is_prefix else words


def _is_difference(before, after):
  """Returns whether a hyphen between two characters subtracts, as in x-y and n-1."""
  is_letter = before[-1].islower() and _ends_with_unit(before)
  return is_letter and (after[0].isdigit() or after[0].islower() and not after[1:2].isalpha())


def _ends_with_unit(text):
  """Returns whether a text ends with a digit or with a single letter."""
  last = text[-1:]
  return last.isdigit() or (last.isalpha() and not text[-2:-1].isalpha())
