"""Questions and passages from files: rows in, Tasks and Passages out, and the order of training.

A source is `embedded` (the knowledge set of the package), a folder with qa.jsonl and corpus.jsonl,
or one file. A row that cannot be used is an error with its file, line and field.
"""

import json
import pathlib
import re
from typing import NoReturn

import numpy as np

from stppo_jax import types

EMBEDDED = pathlib.Path(__file__).parent / 'assets' / 'knowledge'

_PARQUET_COLUMNS = ('data_source', 'prompt', 'question', 'reward_model', 'extra_info')


def load_tasks(source: str, split: str) -> list[types.Task]:
  """Loads the questions of a split: `embedded`, a folder with qa.jsonl, a .jsonl or .parquet file.

  Parquet files have Search-R1's columns. A row without a split of its own belongs to every split.
  """
  path = _find(source, 'qa.jsonl')
  if path.suffix == '.parquet':
    tasks = [_search_r1_task(row) for row in _parquet_rows(path)]
  else:
    tasks = [_task(row) for row in _json_rows(path)]
  chosen = [task for task in tasks if task.split in (split, '')]
  if not chosen:
    known = ', '.join(sorted({task.split for task in tasks})) or 'none, the file is empty'
    raise types.UserError(f'{path}: no question of split {split!r}; splits there: {known}.')
  return chosen


def load_corpus(source: str) -> list[types.Passage]:
  """Loads the passages: `embedded`, a folder with corpus.jsonl, or a .jsonl file.

  Rows are {"id", "title", "text"} or Search-R1's {"id", "contents"}, contents = '"Title"\\ntext'.
  """
  path = _find(source, 'corpus.jsonl')
  passages, seen = [], set()
  for row in _json_rows(path):
    passage = _passage(row)
    if passage.id in seen:
      row.fail('id', f'is {passage.id!r} a second time; ids must be unique')
    seen.add(passage.id)
    passages.append(passage)
  if not passages:
    raise types.UserError(f'{path}: no passages; one JSON object per line is needed.')
  return passages


class TaskStream:
  """An endless order of questions without state: resuming at update n is `take(n)`.

  Each epoch is a permutation of all tasks that depends on (seed, epoch) alone. A batch may cross
  the end of an epoch.
  """

  def __init__(self, tasks: list[types.Task], batch: int, seed: int):
    if not tasks or batch < 1:
      raise types.UserError(
          f'A batch of {batch} out of {len(tasks)} questions: both must be at least 1.'
      )
    self._tasks, self._batch, self._seed = list(tasks), batch, seed

  def take(self, step: int) -> list[types.Task]:
    """Returns the questions of update `step`, counted from 0."""
    size = len(self._tasks)
    orders, taken = {}, []
    for position in range(step * self._batch, (step + 1) * self._batch):
      epoch, offset = divmod(position, size)
      if epoch not in orders:
        orders[epoch] = np.random.default_rng((self._seed, epoch)).permutation(size)
      taken.append(self._tasks[orders[epoch][offset]])
    return taken


class _Row:
  """One row of a file, with errors that name its place."""

  def __init__(self, path, number, fields):
    self.path, self.number, self.fields = path, number, fields

  def fail(self, field, complaint) -> NoReturn:
    raise types.UserError(f'{self.path}:{self.number}: field {field!r} {complaint}.')

  def get(self, field, kind, needed, default=None):
    """Returns the field, of that type; without a default it is required."""
    value = self.fields.get(field)
    if value is None:
      if default is None:
        self.fail(field, f'is missing; {needed} is needed')
      return default
    if not isinstance(value, kind) or isinstance(value, bool):
      self.fail(field, f'is {value!r}; {needed} is needed')
    return value

  def text(self, field, default=None):
    value = self.get(field, str, 'a text', default)
    if default is None and not value.strip():
      self.fail(field, 'is empty; a text is needed')
    return value

  def texts(self, field, default=None):
    value = self.get(field, (list, tuple), 'a list of texts', default)
    if not all(isinstance(item, str) for item in value) or (default is None and not value):
      self.fail(field, f'is {value!r}; a list of at least one text is needed')
    return tuple(value)


def _find(source: str, file_name: str) -> pathlib.Path:
  path = EMBEDDED if source == 'embedded' else pathlib.Path(source).expanduser()
  if path.is_dir():
    path = path / file_name
  if not path.is_file():
    raise types.UserError(
        f'{path}: no such file; give "embedded", a folder with {file_name}, or a file.'
    )
  allowed = ('.jsonl', '.parquet') if file_name == 'qa.jsonl' else ('.jsonl',)
  if path.suffix not in allowed:
    raise types.UserError(f'{path}: a file of type {" or ".join(allowed)} is needed.')
  return path


def _json_rows(path):
  with open(path, encoding='utf-8', errors='replace') as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        fields = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise types.UserError(
            f'{path}:{number}: not JSON ({error}); one JSON object per line is needed.'
        ) from None
      if not isinstance(fields, dict):
        raise types.UserError(
            f'{path}:{number}: a {type(fields).__name__}; one JSON object per line is needed.'
        )
      yield _Row(path, number, fields)


def _parquet_rows(path):
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise types.UserError(
        f'{path}: reading parquet needs pyarrow; run `pip install pyarrow`.'
    ) from None
  try:
    file = parquet.ParquetFile(path)
    present = [name for name in _PARQUET_COLUMNS if name in file.schema_arrow.names]
    rows = file.read(columns=present).to_pylist()
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a parquet file ({reason}).') from None
  for number, fields in enumerate(rows, start=1):
    yield _Row(path, number, fields)


def _passage(row: _Row) -> types.Passage:
  passage_id = str(row.get('id', (str, int), 'a text or a number'))
  if 'contents' in row.fields and 'text' not in row.fields:
    title, _, text = row.text('contents').partition('\n')
    return types.Passage(passage_id, title.strip().strip('"'), text.strip())
  return types.Passage(passage_id, row.text('title'), row.text('text'))


def _task(row: _Row) -> types.Task:
  options = row.get('options', dict, 'an object of letters and texts', {})
  letter = ''
  if options:
    if not all(isinstance(text, str) for text in options.values()):
      row.fail('options', f'is {options!r}; an object of letters and texts is needed')
    letter = row.text('answer')
    if letter not in options:
      row.fail('answer', f'is {letter!r}; one of {", ".join(options)} is needed')
  answers = row.texts('answers', (options[letter],) if options else None)
  return types.Task(
      id=str(row.get('id', (str, int), 'a text or a number')),
      question=row.text('question'),
      answers=answers,
      dataset=row.text('dataset', 'unnamed'),
      split=row.text('split', ''),
      hops=row.get('hops', int, 'a whole number', 1),
      gold=row.texts('gold', ()),
      options=tuple(sorted(options.items())),
      letter=letter,
      steps=_steps(row),
  )


def _steps(row: _Row) -> tuple[tuple[str, str], ...]:
  """Returns (sub-question, answer) pairs from `steps`, or from `evidence` triples."""
  steps = []
  for step in row.get('steps', list, 'a list of {"q", "a"}', []):
    if not (
        isinstance(step, dict) and isinstance(step.get('q'), str) and isinstance(step.get('a'), str)
    ):
      row.fail('steps', f'holds {step!r}; objects with the texts "q" and "a" are needed')
    steps.append((step['q'], step['a']))
  if steps:
    return tuple(steps)
  for triple in row.get('evidence', list, 'a list of [subject, relation, object]', []):
    if not (
        isinstance(triple, list)
        and len(triple) == 3
        and all(isinstance(part, str) for part in triple)
    ):
      row.fail('evidence', f'holds {triple!r}; [subject, relation, object] is needed')
    steps.append((f'{triple[0]} {triple[1]}', triple[2]))
  return tuple(steps)


def _search_r1_task(row: _Row) -> types.Task:
  """Makes a Task of Search-R1's columns; the question is a column or the end of the prompt."""
  reward_model = row.get('reward_model', dict, 'an object with ground_truth', None)
  truth = reward_model.get('ground_truth')
  target = truth.get('target') if isinstance(truth, dict) else None
  if isinstance(target, str):
    target = [target]
  if not isinstance(target, list) or not target or not all(isinstance(t, str) for t in target):
    row.fail(
        'reward_model',
        f'has ground_truth {truth!r}; ' '{"target": [a list of at least one text]} is needed',
    )
  extra = row.get('extra_info', dict, 'an object', {})
  dataset, split = row.text('data_source', 'unnamed'), extra.get('split') or ''
  index = extra.get('index')
  return types.Task(
      id=f'{dataset}-{split}-{row.number - 1 if index is None else index}',
      question=_search_r1_question(row),
      answers=tuple(target),
      dataset=dataset,
      split=split,
  )


def _search_r1_question(row: _Row) -> str:
  if row.fields.get('question') is not None:
    return row.text('question').strip()
  prompt = row.get('prompt', list, 'a list of {"role", "content"}')
  contents = [m.get('content') for m in prompt if isinstance(m, dict) and m.get('role') == 'user']
  if not contents or not isinstance(contents[-1], str):
    row.fail('prompt', f'is {prompt!r}; a message of role "user" with a text is needed')
  question = re.split(r'Question:', contents[-1])[-1].strip()
  if not question:
    row.fail('prompt', 'ends without a question; text after its last "Question:" is needed')
  return question
