"""Rows of tables: Parquet, CSV and TSV."""

from collections.abc import Iterator
from collections.abc import Sequence
import csv
import io
import pathlib
from typing import Any
from typing import BinaryIO

from stppo_jax import cells
from stppo_jax import types


def parquet(path: pathlib.Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
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


def text(file: BinaryIO, delimiter: str) -> Iterator[dict[str, str | None]]:
  """Yields the rows of a text with a line of columns. ValueError: a row that is none."""
  csv.field_size_limit(2**31 - 1)
  lines = io.TextIOWrapper(file, encoding='utf-8-sig', newline='')
  reader = csv.DictReader(lines, delimiter=delimiter)
  while True:
    try:
      row = next(reader, None)
    except (csv.Error, UnicodeDecodeError) as error:
      raise ValueError(f'not a table in UTF-8 ({error})') from error
    if row is None:
      return
    if None in row:
      names = cells.listed(reader.fieldnames or ())
      raise ValueError(f'more cells than the first line has columns ({names})')
    yield {name: _cell(value) for name, value in row.items()}


def _cell(text: str | None) -> str | None:
  return text if text and text.strip() else None


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
