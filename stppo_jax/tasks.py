"""Questions and passages from files: rows in, Tasks and Passages out, and the order of training.

A source is `embedded` (the knowledge set of the package), a folder with qa.jsonl and corpus.jsonl,
or a file; several are separated by commas. A row that cannot be used is an error with its file,
line and field.
"""

from collections.abc import Collection
from collections.abc import Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import re
from typing import NoReturn

from absl import logging
import numpy as np

from stppo_jax import types

EMBEDDED = pathlib.Path(__file__).parent / 'assets' / 'knowledge'

_DOWNLOAD = (
    ' `hf download --repo-type dataset PeterJinGo/nq_hotpotqa_train --local-dir=data` downloads '
    "Search-R1's train.parquet and test.parquet."
)
_PARQUET_COLUMNS = ('data_source', 'prompt', 'question', 'reward_model', 'extra_info')


def load_tasks(source: str, split: str) -> list[types.Task]:
  """Loads the questions of a split: `embedded`, folders with qa.jsonl, .jsonl or .parquet files.

  Parquet files have Search-R1's columns. A row without a split of its own belongs to every split.
  """
  tasks, seen = [], set()
  for path in [_find(part, 'qa.jsonl') for part in _parts(source)]:
    is_parquet = path.suffix == '.parquet'
    for row in _parquet_rows(path) if is_parquet else _json_rows(path):
      task = _search_r1_task(row) if is_parquet else _task(row)
      if is_parquet and (task.id, task.split) in seen:  # such rows have no id of their own
        task = dataclasses.replace(task, id=f'{task.id}-{path.stem}-{row.number}')
      if (task.id, task.split) in seen:
        row.fail('id', f'is {_shown(task.id)} a second time; ids must be unique in a split')
      seen.add((task.id, task.split))
      tasks.append(task)
  chosen = [task for task in tasks if task.split in (split, '')]
  if not chosen:
    known = ', '.join(sorted({task.split for task in tasks})) or 'none, the file is empty'
    raise types.UserError(f'{source}: no question of split {split!r}; splits there: {known}.')
  return chosen


def warn_of_overlap(to_train_on: Sequence[types.Task], held_out: Sequence[types.Task]) -> None:
  """Logs a warning if questions are trained on and held out at once."""
  common = {task.question for task in to_train_on} & {task.question for task in held_out}
  if common - {''}:  # a procedural task has no question
    logging.warning(
        '%d of %d held-out questions are trained on, too, and their scores mean little: give the '
        "rows a 'split', or another config.data.eval_split",
        len(common),
        len(held_out),
    )


def load_corpus(source: str) -> list[types.Passage]:
  """Loads the passages: `embedded`, a folder with corpus.jsonl, or a .jsonl file.

  Rows are {"id", "title", "text"} or Search-R1's {"id", "contents"}, see `read_contents`. Of
  several sources the folders count: the files hold questions.
  """
  parts = _parts(source)
  folders = [part for part in parts if part == 'embedded' or os.path.isdir(part)]
  passages, seen = [], set()
  for path in [_find(part, 'corpus.jsonl') for part in (folders or parts)]:
    for row in _json_rows(path):
      passage = _passage(row)
      if passage.id in seen:
        row.fail('id', f'is {_shown(passage.id)} a second time; ids must be unique')
      seen.add(passage.id)
      passages.append(passage)
  if not passages:
    raise types.UserError(f'{source}: no passages; one JSON object per line is needed.')
  return passages


def read_contents(contents: str) -> tuple[str, str]:
  """Returns (title, text) of Search-R1's `contents`: a title in quotes, a newline, the text.

  A single line is a text without a title.
  """
  title, newline, text = contents.partition('\n')
  if not newline:
    return '', contents.strip()
  title = title.strip()
  if len(title) > 1 and title[0] == title[-1] == '"':
    title = title[1:-1]
  return title, text.strip()


def write_contents(passage: types.Passage) -> str:
  """Inverts `read_contents`."""
  if not passage.title and '\n' not in passage.text:
    return passage.text
  return f'"{passage.title}"\n{passage.text}'


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

  def further(self, step: int, attempt: int, count: int, used: Collection[str]) -> list[types.Task]:
    """Returns `count` more questions for update `step`, at its attempt 1, 2, ...

    They do not depend on earlier updates and do not move the order of `take`. Ids in `used` are
    left out as long as there are others.
    """
    order = np.random.default_rng((self._seed, step, attempt)).permutation(len(self._tasks))
    fresh = [self._tasks[i] for i in order if self._tasks[i].id not in used]
    pool = fresh or [self._tasks[i] for i in order]
    return list(itertools.islice(itertools.cycle(pool), count))

  def by_id(self) -> dict[str, types.Task]:
    """Returns all questions by their ids."""
    return {task.id: task for task in self._tasks}


def _shown(value) -> str:
  """Returns a value for a message; a long one in part."""
  text = repr(value)
  return text if len(text) <= 200 else f'{text[:200]}..'


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
      self.fail(field, f'is {_shown(value)}; {needed} is needed')
    return value

  def text(self, field, default=None):
    value = self.get(field, str, 'a text', default)
    if default is None and not value.strip():
      self.fail(field, 'is empty; a text is needed')
    return value

  def texts(self, field, default=None):
    value = self.get(field, (list, tuple), 'a list of texts', default)
    if not all(isinstance(item, str) for item in value) or (default is None and not value):
      self.fail(field, f'is {_shown(value)}; a list of at least one text is needed')
    return tuple(value)

  def golds(self, field, value):
    """Returns right answers. One without a character would pay for an empty answer."""
    if not all(text.strip() for text in value):
      self.fail(field, f'is {_shown(value)}; each right answer needs a text')
    return tuple(value)


def _parts(source: str) -> list[str]:
  """Splits a source at its commas; a path that has one is a single source."""
  parts = [source] if os.path.exists(source) else source.split(',')
  return [part.strip() for part in parts]


def _find(source: str, file_name: str) -> pathlib.Path:
  path = EMBEDDED if source == 'embedded' else pathlib.Path(source).expanduser()
  if path.is_dir():
    path = path / file_name
  if not path.is_file():
    hint = _DOWNLOAD if path.suffix == '.parquet' else ''
    raise types.UserError(
        f'{path}: no such file; give "embedded", a folder with {file_name}, or a file.{hint}'
    )
  allowed = ('.jsonl', '.parquet') if file_name == 'qa.jsonl' else ('.jsonl',)
  if path.suffix == '.parquet' and path.suffix not in allowed:
    raise types.UserError(
        f'{path}: a .parquet holds questions, and passages are needed: set '
        '--config.data.corpus=FOLDER or a .jsonl file, or --config.retriever.kind=http'
    )
  if path.suffix not in allowed:
    raise types.UserError(f'{path}: a file of type {" or ".join(allowed)} is needed.')
  return path


def _json_rows(path):
  with open(path, 'rb') as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        fields = json.loads(line.decode('utf-8-sig'))
      except UnicodeDecodeError:
        raise types.UserError(
            f'{path}:{number}: not UTF-8; convert the file, as by `iconv -f latin1 -t utf-8`.'
        ) from None
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
    return types.Passage(passage_id, *read_contents(row.text('contents')))
  return types.Passage(passage_id, row.text('title'), row.text('text'))


def _task(row: _Row) -> types.Task:
  options = row.get('options', dict, 'an object of letters and texts', {})
  letter = ''
  if options:
    if not all(isinstance(text, str) for text in options.values()):
      row.fail('options', f'is {_shown(options)}; an object of letters and texts is needed')
    letter = row.text('answer')
    if letter not in options:
      row.fail('answer', f'is {letter!r}; one of {", ".join(options)} is needed')
  answers = row.golds('answers', row.texts('answers', (options[letter],) if options else None))
  hops = row.get('hops', int, 'a whole number', 0)
  if hops < 0:
    row.fail('hops', f'is {hops}; 0 (unknown) or more is needed')
  return types.Task(
      id=str(row.get('id', (str, int), 'a text or a number')),
      question=row.text('question'),
      answers=answers,
      dataset=_dataset(row, 'dataset'),
      split=row.text('split', ''),
      hops=hops,
      gold=row.texts('gold', ()),
      options=tuple(sorted(options.items())),
      letter=letter,
      steps=_steps(row),
  )


def _dataset(row: _Row, field: str) -> str:
  name = row.text(field, 'unnamed')
  if name in ('all', 'macro'):
    row.fail(field, f'is {name!r}, as a mean over all data sets is called; another name is needed')
  return name


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
  target = truth.get('target') if isinstance(truth, dict) else truth
  if isinstance(target, str):
    target = [target]
  if not isinstance(target, list) or not target or not all(isinstance(t, str) for t in target):
    row.fail(
        'reward_model',
        f'has ground_truth {_shown(truth)}; a text or {{"target": [texts]}} is needed',
    )
  extra = row.get('extra_info', dict, 'an object', {})
  dataset, split = _dataset(row, 'data_source'), extra.get('split') or ''
  index = extra.get('index')
  return types.Task(
      id=f'{dataset}-{split}-{row.number - 1 if index is None else index}',
      question=_search_r1_question(row),
      answers=row.golds('reward_model', target),
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
  # The last one that begins a line; else the first, since a question may hold the word itself.
  starts = [match.end() for match in re.finditer(r'^Question:', contents[-1], re.MULTILINE)]
  start = starts[-1] if starts else contents[-1].find('Question:') + len('Question:')
  question = contents[-1][start:].strip() if 'Question:' in contents[-1] else contents[-1].strip()
  if not question:
    row.fail('prompt', 'ends without a question; text after its last "Question:" is needed')
  return question
