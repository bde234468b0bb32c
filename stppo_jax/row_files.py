"""Rows of files as people publish them: JSON, JSON lines, Parquet, CSV and TSV, also with gzip.

A row is a dict of plain Python values. The columns of a row are read elsewhere. The contents of a
JSON file, and not its name, decide whether it holds lines, an array or a single object.
"""

import ast
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import math
import pathlib
import re
import tokenize
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

from absl import logging

from stppo_jax import types

SUFFIXES = ('.jsonl', '.json', '.ndjson', '.parquet', '.csv', '.tsv')
# Files of a folder that hold no rows: those of the Hugging Face hub, of packages and of models.
_NO_ROWS = re.compile(
    r'(dataset_infos?|state|metadata|.*config|package|tokenizer.*|.*index|corpus)\.\w+(\.gz)?'
)
_SHOWN = 12  # columns in a message


class FileRow(NamedTuple):
  """A row of a file, and its place for messages."""

  path: pathlib.Path
  number: int  # the line of a file of lines, or else the number of the row, from 1
  fields: dict[str, Any]
  key: str = ''  # the name of the row, where a JSON object holds rows by their names
  group: str = ''  # the name of the set of rows, where a JSON object holds several sets


def has_known_suffix(path: pathlib.Path) -> bool:
  """Returns whether a file has the suffix of a format that is read here."""
  return _suffix(path) in SUFFIXES


def in_folder(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files with rows in a folder and the folders in it, in the order of their names."""
  paths = []
  for path in sorted(folder.rglob('*')):
    is_hidden = any(part.startswith('.') for part in path.relative_to(folder).parts)
    if path.is_file() and not is_hidden and has_known_suffix(path):
      if not _NO_ROWS.fullmatch(path.name):
        paths.append(path)
  return paths


def read(path: pathlib.Path, columns: Sequence[str] = ()) -> Iterator[FileRow]:
  """Yields the rows of a file. UserError: it cannot be read.

  Of a Parquet file only these columns are read, if any are given.
  """
  suffix = _suffix(path)
  if suffix == '.parquet':
    yield from _parquet_rows(path, columns)
  elif suffix in ('.csv', '.tsv'):
    yield from _table_rows(path, '\t' if suffix == '.tsv' else ',')
  else:
    yield from _json_rows(path)


def column_names(path: pathlib.Path) -> list[str]:
  """Returns the columns of a Parquet file."""
  return _parquet_file(path).schema_arrow.names


@functools.cache
def log_once(message: str) -> None:
  """Logs a message once in this process: each split of a file is read by itself."""
  logging.info('%s', message)


@contextlib.contextmanager
def explain(path: pathlib.Path, number: int) -> Iterator[None]:
  """Gives an error about a row its place."""
  try:
    yield
  except KeyError as error:
    raise types.UserError(f'{path}:{number}: {error.args[0]!r} is missing') from error
  except (ValueError, TypeError) as error:
    raise types.UserError(f'{path}:{number}: {error}') from error


def shown(value: Any) -> str:
  """Returns a value for a message; a long one in part."""
  text = repr(value)
  if len(text) <= 200:
    return text
  return f'{text[:200]}..'


def listed(columns: Iterable[str]) -> str:
  """Returns the names of columns for a message."""
  names = list(map(str, columns))
  more = ', ..' if len(names) > _SHOWN else ''
  return ', '.join(names[:_SHOWN]) + more


def without_nulls(value: Any) -> Any:
  """Returns a value without the null fields that a table adds to its dicts."""
  if isinstance(value, dict):
    return {key: without_nulls(item) for key, item in value.items() if not is_null(item)}
  if isinstance(value, list):
    return [without_nulls(item) for item in value]
  return value


def is_null(value: Any) -> bool:
  """Returns whether a cell is empty: None, or the NaN that pandas writes for it."""
  return value is None or (isinstance(value, float) and math.isnan(value))


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
    pass
  try:
    value = types.without_surrogates(ast.literal_eval(text.strip()))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text
  if not isinstance(value, (list, dict)):
    return text
  if _joins_strings(text):
    raise ValueError(f"{shown(text)} is NumPy's text of an array: write the list as JSON")
  return value


def _joins_strings(text: str) -> bool:
  """Returns whether two string literals follow each other, which Python joins to one."""
  kinds = []
  for token in tokenize.generate_tokens(io.StringIO(text.strip()).readline):
    if token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT):
      kinds.append(token.type)
  pairs = itertools.pairwise(kinds)
  return (tokenize.STRING, tokenize.STRING) in pairs


def _suffix(path: pathlib.Path) -> str:
  name = path.name.lower().removesuffix('.gz')
  return pathlib.PurePath(name).suffix


def _open(path: pathlib.Path) -> BinaryIO:
  if path.suffix.lower() == '.gz':
    return gzip.open(path, 'rb')  # type: ignore[return-value]
  return open(path, 'rb')


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
  """Context manager; yields the bytes of a file. UserError: they cannot be read."""
  try:
    with _open(path) as file:
      yield file
  except (EOFError, gzip.BadGzipFile) as error:
    raise types.UserError(f'{path}: not a whole gzip file ({error}): copy it again') from error


def _json_rows(path: pathlib.Path) -> Iterator[FileRow]:
  with _opened(path) as file:
    first = _first_line(file)
    is_one_line = not _first_line(file)
    file.seek(0)
    if not first:
      return
    is_value = first.lstrip()[:1] in (b'[', b'{')  # or else a line that is an error
    if is_value and (is_one_line or not _is_object(first)):
      with explain(path, 1):
        value = _decode(file.read())
      yield from _rows_of_value(path, value)
      return
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      with explain(path, number):
        fields = _decode(line)
        if not isinstance(fields, dict):
          raise ValueError('one JSON object per line is needed')
      yield FileRow(path, number, fields)


def _first_line(file: BinaryIO) -> bytes:
  """Returns the first line with a visible character, without a byte-order mark."""
  for line in file:
    line = line.removeprefix(b'\xef\xbb\xbf')
    if line.strip():
      return line
  return b''


def _is_object(line: bytes) -> bool:
  try:
    return isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):
    return False


def _decode(text: bytes) -> Any:
  try:
    return types.parse_json(text.decode('utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON in UTF-8 ({error})') from error


def _holds_rows(fields: Mapping[str, Any]) -> bool:
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


def _is_rows(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _rows_of_value(path: pathlib.Path, value: Any) -> Iterator[FileRow]:
  if isinstance(value, dict):
    if _holds_rows(value):
      yield from _rows_of_object(path, value)
    else:
      yield FileRow(path, 1, value)
    return
  for number, fields in enumerate(value, start=1):
    with explain(path, number):
      if not isinstance(fields, dict):
        raise ValueError(f'row {shown(fields)} of the JSON array: an object is needed')
    yield FileRow(path, number, fields)


def _rows_of_object(path: pathlib.Path, value: Mapping[str, Any]) -> Iterator[FileRow]:
  """Yields the rows in a JSON object: those of its lists, or those it holds by their names."""
  lists = {name: item for name, item in value.items() if _is_rows(item)}
  numbers = itertools.count(1)
  for name, rows in lists.items():
    group = name if len(lists) > 1 else ''
    for row in rows:
      yield FileRow(path, next(numbers), row, group=group)
  if lists:
    return
  for name, fields in value.items():
    is_table = name in _ROW_NAMES
    is_set = bool(fields) and all(isinstance(item, dict) for item in fields.values())
    if is_table:
      with explain(path, 1):
        raise ValueError(
            f'column {name!r} holds the values of all rows: write one object per row, as '
            "pandas does with orient='records', lines=True"
        )
    if not is_set:
      yield FileRow(path, next(numbers), dict(fields), name)
      continue
    for key, row in fields.items():
      yield FileRow(path, next(numbers), dict(row), key, name)


def _parquet_file(path: pathlib.Path) -> Any:
  try:
    import pyarrow
    from pyarrow import parquet
  except ModuleNotFoundError as error:
    raise types.UserError(f'{path}: a .parquet file needs pyarrow: pip install pyarrow') from error
  try:
    return parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a parquet file ({reason}).') from None


def _parquet_rows(path: pathlib.Path, columns: Sequence[str]) -> Iterator[FileRow]:
  import pyarrow

  file = _parquet_file(path)
  present = file.schema_arrow.names
  if columns:
    present = [name for name in present if name in columns]
  numbers = itertools.count(1)
  try:
    for batch in file.iter_batches(columns=present):
      for fields in batch.to_pylist(maps_as_pydicts='strict'):
        yield FileRow(path, next(numbers), fields)
  except (pyarrow.ArrowException, OSError, KeyError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a whole parquet file ({reason}).') from None


def _table_rows(path: pathlib.Path, delimiter: str) -> Iterator[FileRow]:
  csv.field_size_limit(2**31 - 1)
  with _opened(path) as file:
    text = io.TextIOWrapper(file, encoding='utf-8-sig', newline='')
    reader = csv.DictReader(text, delimiter=delimiter)
    number = 1
    while True:
      number += 1
      with explain(path, number):
        try:
          cells = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
          raise ValueError(f'not a table in UTF-8 ({error})') from error
        if cells is None:
          return
        if None in cells:
          names = listed(reader.fieldnames or ())
          raise ValueError(f'more cells than the first line has columns ({names})')
      yield FileRow(path, number, {name: _cell(value) for name, value in cells.items()})


def _cell(text: str | None) -> str | None:
  return text if text and text.strip() else None
