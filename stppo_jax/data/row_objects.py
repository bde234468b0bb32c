"""Rows within one JSON value: an array, an object that is a row, or an object that holds rows."""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from stppo_jax import types


class NamedRow(NamedTuple):
  """A row, and its names in the value that holds it."""

  fields: dict[str, Any]
  key: str = ''  # the name of the row, where an object holds rows by their names
  group: str = ''  # the name of the set of rows, where an object holds several sets


def rows(value: Any) -> Iterator[NamedRow]:
  """Yields the rows of a JSON value. ValueError: something else is among them."""
  if isinstance(value, dict):
    if _holds_rows(value):
      yield from _rows_of_object(value)
    else:
      yield NamedRow(value)
    return
  for fields in value:
    if not isinstance(fields, dict):
      raise ValueError(f'row {types.shown(fields)} of the JSON array: an object is needed')
    yield NamedRow(fields)


def _rows_of_object(value: Mapping[str, Any]) -> Iterator[NamedRow]:
  """Yields the rows in a JSON object: those of its lists, or those it holds by their names."""
  lists = {name: item for name, item in value.items() if _is_rows(item)}
  for name, items in lists.items():
    group = name if len(lists) > 1 else ''
    for row in items:
      yield NamedRow(row, group=group)
  if lists:
    return
  for name, fields in value.items():
    is_table = name in _ROW_NAMES
    is_set = bool(fields) and all(isinstance(item, dict) for item in fields.values())
    if is_table:
      raise ValueError(
          f'column {name!r} holds the values of all rows: write one object per row, as '
          "pandas does with orient='records', lines=True"
      )
    if not is_set:
      yield NamedRow(dict(fields), name)
      continue
    for key, row in fields.items():
      yield NamedRow(dict(row), key, name)


def _holds_rows(fields: Mapping[str, object]) -> bool:
  """Returns whether a JSON object holds rows: in one list, by their names, or in named sets."""
  values = list(fields.values())
  if any(map(_is_rows, values)) and not any(name in fields for name in _ROW_NAMES):
    return True
  return bool(values) and all(isinstance(value, dict) for value in values)


# A JSON object with one of these names is a row itself.
_ROW_NAMES = (
    'question',
    'Question',
    'QUESTION',
    'problem',
    'query',
    'prompt',
    'messages',
    'conversations',
    'reward_model',
    'contents',
    'text',
    'tokens',
    'turns',
)


def _is_rows(value: object) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)
