"""The values of a question's columns: options, the option that an answer names, and answers."""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import re
import string
from typing import Any
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.data import cells
from stppo_jax.data import layouts
from stppo_jax.data.layouts import SetLayout
from stppo_jax.types import shown

LETTERS = string.ascii_uppercase
TRUTHS = ('yes', 'no')
DECISIONS = ('yes', 'no', 'maybe')
# Values of columns that mark a row without an answer.
_UNANSWERABLE = {'answerable': False, 'is_impossible': True}
ALIASES = 'answer_aliases'
STATES = tuple(_UNANSWERABLE)
_LABEL = re.compile(r'\s*\(?([A-Za-z])(?:\)|[.:]\s)')  # before the text of an option
_BOX = re.compile(r'\\f?boxed(?:\s*\{|\s)')
_SPAN_KEYS = {'text', 'answer_start', 'answer_end', 'tokens'}  # others may say that one is wrong


class Unanswerable(Exception):
  """A row has no answer. The message names its column."""


class RowOptions(NamedTuple):
  """The options of a row."""

  texts: dict[str, str]  # by letter, in the order of the file
  positions: list[str]  # the letter at each position of the file; []: positions mean nothing
  columns: dict[str, str]  # {name of the option's column: letter}


def get(fields: Mapping[str, object], name: str) -> object:
  """Returns the value of a column, or of a key in it (`a.b`); None: there is none."""
  if name in fields:
    value = fields[name]
    return None if cells.is_null(value) else value
  first, dot, rest = name.partition('.')
  outer = value_of(fields.get(first)) if dot else None
  return get(outer, rest) if isinstance(outer, dict) else None


def first_of(fields: Mapping[str, object], names: Sequence[str]) -> tuple[str, object]:
  """Returns (name, value) of the first column with a value; ('', None) without one."""
  for name in names:
    value = get(fields, name)
    if not is_empty(value):
      return name, value
  return '', None


def value_of(value: object) -> Any:
  """Returns a value, or what its text writes in JSON or Python."""
  if not isinstance(value, str):
    return value
  try:
    return cells.parsed(value)
  except ValueError:  # NumPy's text of an array
    return value


def is_empty(value: object) -> bool:
  """Returns whether a cell has no value."""
  is_blank = isinstance(value, str) and not value.strip()
  return is_blank or cells.is_null(value) or value in ([], {})


def texts_in(value: object) -> list[str]:
  """Returns the texts and numbers of a list or a dict; [] if it holds anything else."""
  value = value_of(value)
  if not isinstance(value, (list, dict)):
    return []
  if isinstance(value, dict):
    value = list(value.values())
  if types.is_of(value, list[dict]):
    value = [_text_of_object(item) for item in value]
  texts = [_text_of_number(item) for item in value]
  return texts if types.is_of(texts, list[str]) else []


def _text_of_object(item):
  """Returns the text of an object in a list: under its usual name, or the last one."""
  text = item.get('text', item.get('value'))
  others = [other for other in item.values() if isinstance(other, str)]
  return others[-1] if text is None and others else text


def whole(value: Any) -> int | None:
  """Returns a whole number that may be written as a text, or None."""
  if isinstance(value, str):
    value = float(value) if re.fullmatch(r'\s*-?[0-9]{1,9}(\.0+)?\s*', value) else None
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  return int(value) if is_number and float(value).is_integer() else None


def check_state(fields: Mapping[str, object]) -> None:
  """Raises Unanswerable if a column says that the question has no answer."""
  for name, meaning in _UNANSWERABLE.items():
    value = get(fields, name)
    if not is_empty(value) and cells.flag(name, value) is meaning:
      raise Unanswerable(f'column {name!r} is {value!r}')


# Options.


def option_columns(layout: SetLayout, names: Sequence[str]) -> tuple[str, ...]:
  """Returns the columns of a file that hold the options, in their order."""
  if layout.wrong:
    return (*layout.answers, *layout.wrong)
  options = layout.options
  if isinstance(options, tuple):
    return options
  if not options.endswith('..'):
    return (options,) if options else ()
  columns = []
  code = ord(options[-3])
  while options[:-3] + chr(code) in names:
    columns.append(options[:-3] + chr(code))
    code += 1
  return tuple(columns)


def choice_of(
    layout: SetLayout, fields: Mapping[str, object], columns: Sequence[str]
) -> RowOptions | None:
  """Returns the options of a row; None: it has none. ValueError: they cannot be read."""
  if layout.wrong:
    texts = [_option_text(name, get(fields, name)) for name in columns if name]
    distinct = sorted(set(filter(None, texts)))
    return RowOptions(dict(zip(LETTERS, distinct)), [], {}) if len(distinct) > 1 else None
  if len(columns) > 1:
    start = len(os.path.commonprefix(columns))
    _check_order('the columns of options', [name[start:].upper() for name in columns])
    texts = [_option_text(name, get(fields, name)) for name in columns]
    choice = _lettered(texts)
    return choice._replace(columns=dict(zip(columns, LETTERS))) if choice.texts else None
  (name,) = columns
  value: Any = value_of(get(fields, name))
  if is_empty(value):
    return None
  value = _by_letter(value)
  if isinstance(value, list):
    if len(value) > len(LETTERS):
      raise ValueError(f'column {name!r} has {len(value)} options: at most 26 are read')
    return _lettered([_option_text(name, text) for text in value])
  if not isinstance(value, dict):
    raise ValueError(f'column {name!r} is {shown(value)}: a dict or a list of texts is needed')
  present = {str(key): _option_text(name, text) for key, text in value.items()}
  present = {key: text for key, text in present.items() if text is not None}
  letters = list(present)
  has_positions = letters == sorted(letters) and not any(map(str.isdecimal, letters))
  return RowOptions(present, letters if has_positions else [], {})


def _by_letter(value: object) -> object:
  """Returns options by their letters, if two lists or a list of objects write them (ARC, MedQA)."""
  if isinstance(value, dict) and isinstance(value.get('text'), list):
    labels = value.get('label') or LETTERS[: len(value['text'])]
    pairs = list(zip(labels, value['text'], strict=True))
  elif isinstance(value, list) and types.is_of(value, list[dict]):
    pairs = [(item.get('key', item.get('label')), item) for item in value]
    pairs = [(key, item.get('value', item.get('text'))) for key, item in pairs]
  else:
    return value
  options = dict(pairs)
  if len(options) < len(pairs):
    raise ValueError(f'{shown(value)}: each option needs a letter of its own')
  return options


def _lettered(texts):
  """Returns the options of texts in the order of letters. A text may be None."""
  labels = [_LABEL.match(text or '') for text in texts]
  own = [label[1].upper() for label in labels if label]
  if len(own) == len(texts):
    _check_order('the options', own)
  present = {letter: text for letter, text in zip(LETTERS, texts) if text is not None}
  return RowOptions(present, list(LETTERS[: len(texts)]), {})


def _check_order(what, own):
  """Raises ValueError if labels are not the first letters in their order.

  `E. coli` beside `S. aureus` is no label. Those of `B) x` beside `C) y` have lost an option.
  """
  is_label = len(set(own)) == len(own) and set(own) <= set(LETTERS[: len(own) + 2])
  if is_label and own != list(LETTERS[: len(own)]):
    raise ValueError(f'{what} have the letters {cells.listed(own)}, in another order')


def _option_text(name, value):
  if cells.is_null(value):
    return None
  text = _text_of_number(value)
  if not isinstance(text, str):
    raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
  return text.strip() or None


def _text_of_number(value):
  """Returns a number as a text, and anything else as it is."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return value
  return str(int(value)) if float(value).is_integer() else str(value)


def named(name: str, value: object, choice: RowOptions) -> object:
  """Returns what a column of the answer holds: a text, a number or None.

  Raises Unanswerable for a secret answer, and for one that names several options.
  """
  value = value_of(value)
  if isinstance(value, list) and len(value) == 1:
    value = value[0]
  if isinstance(value, (list, dict)):
    if not value:
      return None
    raise Unanswerable(f'column {name!r} is {shown(value)}, which are several options')
  if is_empty(value):
    return None
  if whole(value) == -1 and '-1' not in choice.texts.values():
    raise Unanswerable(f'column {name!r} is {value}')
  text = value.strip() if isinstance(value, str) else value
  if isinstance(text, str) and len(text) > 1 and text not in choice.texts.values():
    if set(text) <= choice.texts.keys() and text not in choice.texts:
      raise Unanswerable(f'column {name!r} is {value!r}, which are several options')
  return text


def letter_of(kind: str, value: object, choice: RowOptions) -> str | None:
  """Returns the letter of the option that a value names; None: it names none.

  '': it is the text of several options.
  """
  text = _text_of_number(value)
  if not isinstance(text, str):
    return None
  if kind == 'text':
    letters = [letter for letter, option in choice.texts.items() if option == text]
    return letters[0] if len(letters) == 1 else '' if letters else None
  if kind == 'letter':
    bare = text.strip('(). ').lower()  # 'B' for '(B)' and 'B.'
    letters = [letter for letter in choice.texts if letter.lower() == bare]
    return letters[0] if letters else choice.columns.get(_column_of(text, choice))
  position = whole(value)
  if position is None or not choice.positions:
    return None
  position -= int(kind == 'index1')
  if not 0 <= position < len(choice.positions):
    return None
  letter = choice.positions[position]
  return letter if letter in choice.texts else None


def _column_of(text, choice):
  return next((name for name in choice.columns if name.lower() == text.lower()), '')


# Answers that are texts.


def texts_of(layout: SetLayout, fields: Mapping[str, object]) -> tuple[str, ...]:
  """Returns the answers of a row, also a truth as a text. Raises Unanswerable and ValueError."""
  name, kind = next(iter(layout.answers.items()))
  if kind not in (layouts.TRUTH, layouts.DECISION):
    return answers_of(layout, fields)
  value = get(fields, name)
  if is_empty(value):
    raise Unanswerable(f'column {name!r} is empty')
  if kind == layouts.TRUTH:
    is_truth = isinstance(value, bool) or str(value).lower() in ('true', 'false')
    if not is_truth:
      raise ValueError(f'column {name!r} is {shown(value)}: true or false is needed')
    return (TRUTHS[0] if cells.flag(name, value) else TRUTHS[1],)
  if str(value).strip().lower() not in DECISIONS:
    raise ValueError(f'column {name!r} is {shown(value)}: one of yes, no, maybe is needed')
  return (str(value).strip().lower(),)


def texts_of_value(name: str, value: object) -> list[str]:
  """Returns the answers in a column. ValueError: it holds something else."""
  texts = _texts(name, _of_text(name, value) if isinstance(value, str) else value)
  return list(filter(None, map(str.strip, texts)))


def answers_of(layout: SetLayout, fields: Mapping[str, object]) -> tuple[str, ...]:
  """Returns the accepted answers of a row. Raises Unanswerable. ValueError: they cannot be read."""
  answers: list[str] = []
  for name, kind in layout.answers.items():
    value = get(fields, name)
    if is_empty(value):
      continue
    if value in layout.no_answer or value in [[text] for text in layout.no_answer]:
      raise Unanswerable(f'column {name!r} is {value!r}')
    if kind == layouts.BOXED and not _last_box(str(value)):
      raise Unanswerable(f'column {name!r} has no complete box')
    texts = texts_of_value(name, value)
    answers += texts
    answers += filter(None, (_bare_number(text, kind) for text in texts))
  if not answers:
    name = next(iter(layout.answers))
    if get(fields, name) is None:
      raise Unanswerable(f'column {name!r} is empty')
    outer = name.partition('.')[0]
    raise Unanswerable(f'column {outer!r} has the answers {shown(get(fields, name))}')
  if layout.spans:
    _check_spans(layout.spans, get(fields, layout.spans))
  aliases = get(fields, ALIASES)
  if not is_empty(aliases) and layout.source != layouts.USER:
    answers += _texts(ALIASES, value_of(aliases))
  return tuple(dict.fromkeys(filter(None, map(str.strip, answers))))


def _of_text(name, text):
  """Returns what a text holds: itself, a list of answers in JSON, or the end of a solution."""
  solution = re.search(r'####[ \t]*(\S[^\n]*?)\s*\Z', text)
  if solution:  # GSM8K
    return re.sub(r'(?<=[0-9]),(?=[0-9]{3}(?![0-9]))', '', solution[1])
  boxed = _last_box(text)
  if boxed:  # MATH
    return boxed
  try:
    value = cells.parsed(text)
  except ValueError as error:
    raise ValueError(f'column {name!r}: {error}') from error
  if isinstance(value, dict):
    return value
  if isinstance(value, list):
    # A ground truth may be for a user's own reward, which parses the text.
    is_for_reward = name.rpartition('.')[2] == 'ground_truth'
    has_objects = any(isinstance(item, dict) for item in value)
    if name == 'possible_answers' or types.is_of(value, list[str]):
      return value
    if has_objects and not is_for_reward:
      return value
  return text  # such as the interval [1, 2]


def _last_box(text):
  r"""Returns what the last `\boxed{..}` of a solution holds, or '' without a complete one."""
  *_, begin = [None, *_BOX.finditer(text)]
  if begin is None:
    return ''
  if not begin[0].endswith('{'):  # `$\boxed 5$`
    return text[begin.end() :].partition('$')[0].strip()
  depth = 1
  for brace in re.finditer(r'\\.|[{}]', text[begin.end() :]):
    depth += {'{': 1, '}': -1}.get(brace[0], 0)
    if not depth:
      return text[begin.end() :][: brace.start()].strip()
  return ''


def _texts(name, value):
  """Returns a value as a list of texts. Numbers are written as texts."""
  if isinstance(value, dict):
    value = cells.without_nulls(value)
    if list(value) != ['target']:
      raise ValueError(
          f'column {name!r} has the keys {cells.listed(value)}, and is no answer: name the one '
          'with the answer in data.columns, or use an environment with a reward of its own'
      )
    value = value['target']
  values = value if isinstance(value, list) else [value]
  if len(values) == 1 and isinstance(values[0], list):  # a list in a list
    values = values[0]
  texts = []
  for item in values:
    if cells.is_null(item):
      continue
    if isinstance(item, dict) and set(item) <= _SPAN_KEYS:  # SQuAD of its authors
      item = item.get('text')
    text = _text_of_number(item)
    if not isinstance(text, str):
      raise ValueError(f'column {name!r} is {shown(value)}: a text, a number or a list is needed')
    texts.append(text)
  return texts


def _bare_number(text, kind):
  """Returns the number of '42.0' and '9 (apples)' as '42' and '9', or None.

  '042' is also '42' only in a set of whole numbers with leading zeros.
  """
  match = re.fullmatch(r'(-?)([0-9][0-9,]*)(\.[0-9]+)?( \([^()]+\))?', text)
  if not match:
    return None
  sign, digits, fraction, _ = match.groups('')
  if kind == 'number':
    digits = digits.lstrip('0') or '0'
  number = sign + digits + (fraction if fraction.strip('.0') else '')
  return number if number != text else None


def _check_spans(name, value):
  """Raises Unanswerable if spans of a text are apart, as the parts of one answer (Quoref, DROP)."""
  if isinstance(value, dict):
    pairs = list(zip(value.get('text') or (), value.get('answer_start') or ()))
  elif types.is_of(value, list[dict]):
    pairs = [(item.get('text'), item.get('answer_start')) for item in value]
  else:
    return
  pairs = sorted((start, text) for text, start in pairs if whole(start) is not None)
  end = None
  for start, text in pairs:
    if end is not None and start >= end and len({text for _, text in pairs}) > 1:
      raise Unanswerable(f'column {name!r} has parts that are apart, and none is right alone')
    end = max(end or 0, start + len(text))
