"""Rows of tables: Parquet, Arrow, CSV and TSV."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import csv
import io
import itertools
import pathlib
import types as types_lib
from typing import Any
from typing import BinaryIO

from stppo_jax import types
from stppo_jax.data import cells


def parquet(path: pathlib.Path, columns: Sequence[str]) -> Iterator[dict[str, object]]:
  """Yields the rows of a Parquet file: these columns, or all. UserError: it cannot be read.

  The other columns are None in each row, so that messages can name them.
  """
  import pyarrow

  file = _parquet_file(path)
  names = file.schema_arrow.names
  present = [name for name in names if not columns or name in columns]
  try:
    for batch in file.iter_batches(columns=present):
      for row in batch.to_pylist(maps_as_pydicts='strict'):
        yield dict.fromkeys(names) | row
  except (pyarrow.ArrowException, OSError, KeyError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a whole parquet file ({reason}).') from None


def arrow(path: pathlib.Path) -> Iterator[dict[str, object]]:
  """Yields the rows of a file of `Dataset.save_to_disk`. UserError: it cannot be read."""
  pyarrow = _pyarrow(path)
  try:
    with pyarrow.ipc.open_stream(path) as batches:
      for batch in batches:
        yield from batch.to_pylist(maps_as_pydicts='strict')
  except (pyarrow.ArrowException, OSError, KeyError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a whole file of Dataset.save_to_disk ({reason}).') from None


def text(file: BinaryIO, delimiter: str) -> Iterator[dict[str, str | None]]:
  """Yields the rows of a text with a line of columns. ValueError: a row that is none.

  A file with tabs may have no such line, if its first cells are numbers (ColBERT, MS MARCO): its
  columns are `id`, `text` and perhaps `title`.
  """
  csv.field_size_limit(2**31 - 1)
  lines = io.TextIOWrapper(file, encoding='utf-8-sig', newline='')
  if delimiter == '\t':
    try:
      is_quoted = _is_quoted(lines)
    except UnicodeDecodeError as error:
      raise ValueError(f'not a table in UTF-8 ({error})') from error
    lines.seek(0)
    rows = csv.reader(lines, delimiter='\t', strict=True) if is_quoted else _tab_rows(lines)
  else:
    rows = csv.reader(lines)
  names: list[str] | None = None
  while True:
    try:
      row = next(rows, None)
    except (csv.Error, UnicodeDecodeError) as error:
      raise ValueError(f'not a table in UTF-8 ({error})') from error
    if row is None:
      return
    if not row:
      continue
    if names is None:
      if delimiter != '\t' or not row[0].isdecimal() or len(row) not in (2, 3):
        names = row
        twice = [name for name, number in collections.Counter(names).items() if number > 1]
        if twice:
          raise ValueError(f'two columns are called {twice[0]!r}: rename one of them')
        continue
      names = ['id', 'text', 'title'][: len(row)]
    if len(row) > len(names):
      raise ValueError(f'more cells than the first line has columns ({cells.listed(names)})')
    padded = row + [''] * (len(names) - len(row))
    yield {name: _cell(value) for name, value in zip(names, padded)}


def _is_quoted(lines: Iterable[str]) -> bool:
  """Returns whether a text with tabs can be read as csv.writer writes it.

  The quotes fit in the whole text, and all rows have the same number of cells.
  """
  width = 0
  try:
    for row in csv.reader(lines, delimiter='\t', strict=True):
      width = width or len(row)
      if row and len(row) != width:
        return False
  except csv.Error:
    return False
  return True


def _tab_rows(lines: Iterable[str]) -> Iterator[list[str]]:
  """Yields the cells of the rows of a text with tabs, in which quotes may be plain characters.

  A line whose quotes do not fit is a row without quoting if it and the next line have all cells.
  Otherwise it begins a row with line ends in quotes, as csv reads it.
  """
  width = 0
  pending = ''
  for line in itertools.chain(lines, ('',)):
    row = _quoted(pending + line, width)
    is_whole = line.count('\t') + 1 == width
    if pending and (not line or is_whole and (pending.count('\t') + 1 == width or row is None)):
      for earlier in pending.splitlines():
        yield earlier.split('\t')
      pending = ''
      row = _quoted(line, width)
    if row is None and width:
      pending += line
      continue
    pending = ''
    row = line.rstrip('\r\n').split('\t') if row is None else row
    width = width or len(row)
    yield row


def _quoted(text: str, width: int) -> list[str] | None:
  """Returns the cells of a row whose quotes fit, or None. A `width` of 0 is not known yet."""
  if '"' not in text:
    return text.rstrip('\r\n').split('\t') if text.strip('\r\n') else []
  try:
    (row,) = csv.reader([text], delimiter='\t', strict=True)
  except (csv.Error, ValueError):
    return None
  return row if not width or len(row) <= width else None


def _cell(text: str | None) -> str | None:
  return text if text and text.strip() else None


def _parquet_file(path: pathlib.Path) -> Any:
  pyarrow = _pyarrow(path)
  from pyarrow import parquet

  try:
    return parquet.ParquetFile(path)
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a parquet file ({reason}).') from None


def _pyarrow(path: pathlib.Path) -> types_lib.ModuleType:
  try:
    import pyarrow
    import pyarrow.ipc
  except ModuleNotFoundError as error:
    raise types.UserError(
        f'{path}: a {path.suffix} file needs pyarrow: pip install pyarrow'
    ) from error
  return pyarrow
