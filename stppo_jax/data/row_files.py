"""Rows of files as people publish them: JSON, JSON lines, Parquet, Arrow, CSV and TSV, with gzip.

A row is a dict of plain Python values. The columns of a row are read elsewhere. The contents of a
JSON file, and not its name, decide whether it holds lines, an array or a single object.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools
import gzip
import itertools
import json
import pathlib
import re
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

from absl import logging

from stppo_jax import types

SUFFIXES = ('.jsonl', '.json', '.ndjson', '.parquet', '.arrow', '.csv', '.tsv')
# Files of a folder that hold no rows: those of the Hugging Face hub, of packages and of models.
_NO_ROWS = re.compile(
    r'((dataset_infos?|dataset_dict|state|.*config|package|tokenizer.*|.*index|corpus)\.\w+'
    r'|metadata\.json)(\.gz)?'
)
_CORPUS = 'corpus'  # a folder with the passages of a set, as BEIR on the hub has
_CACHE = re.compile(r'cache-[0-9a-f]{8,}.*\.arrow')  # results of Dataset.map and filter


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
  """Returns the files with rows in a folder and the folders in it, in the order of their names.

  The files of a folder `corpus` in it hold passages, and do not count. UserError: two files have
  one name with different suffixes, or a file of `Dataset.save_to_disk` is missing.
  """
  paths: dict[pathlib.Path, pathlib.Path] = {}  # by path without suffixes
  saved: dict[pathlib.Path, list[str]] = {}
  for path in sorted(folder.rglob('*')):
    *folders, name = path.relative_to(folder).parts
    is_hidden = any(part.startswith('.') for part in (*folders, name))
    if not path.is_file() or is_hidden or not has_known_suffix(path):
      continue
    if _CORPUS in folders:
      log_once(f'{path.parent}: holds passages by its name, and no questions')
      continue
    if path.parent not in saved:
      saved[path.parent] = _saved_files(path.parent)
    if _NO_ROWS.fullmatch(name) or _is_cache(path, saved[path.parent]):
      continue
    stem = name.lower().removesuffix('.gz').removesuffix(_suffix(path))
    twin = paths.setdefault(path.with_name(stem), path)
    if twin != path:
      raise types.UserError(
          f'{path}: may hold the same rows as {twin.name}: give one of the two files, or move one '
          'to another folder'
      )
  return list(paths.values())


def _is_cache(path, saved):
  """Returns whether a file is a cache of the library `datasets`, and no part of a set."""
  if path.suffix.lower() != '.arrow':
    return False
  is_cache = path.name not in saved if saved else bool(_CACHE.fullmatch(path.name))
  if is_cache:
    log_once(f'{path}: a cache of the library datasets, which is not read')
  return is_cache


def _saved_files(folder):
  """Returns the files that state.json of `Dataset.save_to_disk` lists. UserError: one is missing.

  []: another program wrote the folder.
  """
  path = folder / 'state.json'
  if not path.is_file():
    return []
  with explain(path, 1):
    state = _decode(path.read_bytes())
  files: Any = state.get('_data_files') if isinstance(state, dict) else None
  if not types.is_of(files, list[dict]):
    return []
  names = [file['filename'] for file in files if isinstance(file.get('filename'), str)]
  for name in names:
    if not (folder / name).is_file():
      raise types.UserError(f'{path}: lists {name}, which is missing: copy the whole folder again')
  return names


def read(path: pathlib.Path, columns: Sequence[str] = ()) -> Iterator[FileRow]:
  """Yields the rows of a file. UserError: it cannot be read.

  Of a Parquet file only these columns are read, if any are given.
  """
  suffix = _suffix(path)
  if suffix in ('.parquet', '.arrow'):
    from stppo_jax.data import row_tables

    is_arrow = suffix == '.arrow'
    rows = row_tables.arrow(path) if is_arrow else row_tables.parquet(path, columns)
    for number, fields in enumerate(rows, start=1):
      yield FileRow(path, number, fields)
  elif suffix in ('.csv', '.tsv'):
    from stppo_jax.data import row_tables

    with _opened(path) as file:
      lines = row_tables.text(file, '\t' if suffix == '.tsv' else ',')
      for number in itertools.count(2):  # after the names of the columns
        with explain(path, number):
          cells = next(lines, None)
        if cells is None:
          return
        yield FileRow(path, number, cells)
  else:
    yield from _json_rows(path)


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
    is_one_line = is_one_line and _suffix(path) == '.json'  # else it is a row, also with lists
    if is_value and (is_one_line or not _is_object(first)):
      from stppo_jax.data import row_objects

      with explain(path, 1):
        value = _decode(file.read())
      rows = row_objects.rows(value)
      for number in itertools.count(1):
        with explain(path, number):
          row = next(rows, None)
        if row is None:
          return
        yield FileRow(path, number, *row)
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


def _decode(text: bytes) -> object:
  try:
    return types.parse_json(text.decode('utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not JSON in UTF-8 ({error})') from error
