"""Cells of tables: lists and dicts that are written as texts, and empty cells."""

import ast
from collections.abc import Iterable
from collections.abc import Mapping
import contextlib
import functools
import io
import itertools
import math
import re
import tokenize
from typing import Any

from stppo_jax import types

_MOST_SHOWN = 12  # columns in a message
_MOST_CHARS = 300  # characters of a row in a message
_TRUE = ('true', '1', '1.0', 'yes', 't')
_FALSE = ('false', '0', '0.0', 'no', 'f')
# Names of columns that may mark bad rows, and the value that does.
_MARKS = (
    (
        re.compile(
            '(?<!in)correct|success|solved|passed|accepted|verified|(?<!in)valid|good|approved'
            '|keep|include|chosen|thumbs|quality|accuracy|score|reward|rating'
        ),
        False,
    ),
    (
        re.compile(
            'incorrect|invalid|bad|fail|reject|wrong|exclude|ignore|skip|flagged|refusal|toxic'
            '|harmful|hallucination|truncated|error'
        ),
        True,
    ),
)
_BAD_TEXT = re.compile(
    'incorrect|invalid|wrong|bad|poor|fail(ed|ure)?|reject(ed)?|undesirable|un(re)?solved|error',
    re.IGNORECASE,
)
_NO_ERROR = ('', 'no', 'none', 'null', 'nan', 'ok', 'no error', *_FALSE)


def listed(columns: Iterable[str]) -> str:
  """Returns the names of columns for a message."""
  names = list(map(str, columns))
  more = ', ..' if len(names) > _MOST_SHOWN else ''
  return ', '.join(names[:_MOST_SHOWN]) + more


def shown_row(fields: Mapping[str, object]) -> str:
  """Returns a row for a message, cut short."""
  text = str(without_nulls(dict(fields)))
  return text if len(text) <= _MOST_CHARS else f'{text[:_MOST_CHARS]}..'


def without_nulls(value: object) -> object:
  """Returns a value without the null fields that a table adds to its dicts."""
  if isinstance(value, dict):
    return {key: without_nulls(item) for key, item in value.items() if not is_null(item)}
  if isinstance(value, list):
    return [without_nulls(item) for item in value]
  return value


def is_null(value: object) -> bool:
  """Returns whether a cell is empty: None, or the NaN that pandas writes for it."""
  return value is None or (isinstance(value, float) and math.isnan(value))


def flag(name: str, value: object) -> bool:
  """Returns a truth that may be a number or a text. ValueError: it is of another kind."""
  text = str(value).strip().lower()
  if text in _TRUE:
    return True
  if text in _FALSE:
    return False
  raise ValueError(
      f'column {name!r} is {types.shown(value)}: true or false is needed, also as 1, 0 or a text'
  )


def is_error(value: object) -> bool:
  """Returns whether a cell tells of an error, and not that there was none."""
  return bool(value) and str(value).strip().lower() not in _NO_ERROR


def marks_bad(name: str, value: object) -> bool:
  """Returns whether the cell of a column that is not read may say that its row is bad."""
  if is_null(value):
    return False
  name = name.lower()
  if isinstance(value, str) and _BAD_TEXT.fullmatch(value.strip()):
    return True
  if isinstance(value, str) and 'error' in name:
    has_words = re.search('[A-Za-z]{3}', value) is not None  # 1e-2 is a tolerance
    return has_words and is_error(value)
  for bad in _bad_flags(name):
    with contextlib.suppress(ValueError):  # a value that is no flag marks nothing
      if flag(name, value) is bad:
        return True
  return False


@functools.lru_cache(1024)  # one entry per column, and not per cell
def _bad_flags(name: str) -> tuple[bool, ...]:
  """Returns the flags that mark a bad row in a column of this name."""
  return tuple(bad for pattern, bad in _MARKS if pattern.search(name))


def parsed(text: str) -> Any:
  """Returns the list or dict that a text writes in JSON or Python, or else the text itself.

  Raises ValueError for NumPy's text of an array, which has no commas.
  """
  start = text.lstrip()[:1]
  if start not in ('[', '{'):
    return text
  try:
    return types.parse_json(text)
  except (ValueError, RecursionError):
    pass  # it may be Python
  try:
    value = types.without_surrogates(ast.literal_eval(text.strip()))
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return text  # TypeError: a set of sets, or a dict with a list as its key
  if not isinstance(value, (list, dict)):
    return text
  if _joins_strings(text):
    raise ValueError(f"{types.shown(text)} is NumPy's text of an array: write the list as JSON")
  return value


def _joins_strings(text: str) -> bool:
  """Returns whether two string literals follow each other, which Python joins to one."""
  kinds = []
  for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
    if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT):
      kinds.append(token.type)
  pairs = itertools.pairwise(kinds)
  return (tokenize.STRING, tokenize.STRING) in pairs
