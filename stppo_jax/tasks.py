"""Questions and passages from files: rows in, Tasks and Passages out, and the order of training.

A source is `embedded` (the knowledge set of the package), a folder with qa.jsonl and corpus.jsonl,
or a file; several are separated by commas. A row that cannot be used is an error with its file,
line and field.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
from typing import Any

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
  tasks: list[types.Task] = []
  seen: set[tuple[str, str]] = set()
  paths = [_find(part, 'qa.jsonl') for part in _parts(source)]
  for path in paths:
    is_parquet = path.suffix == '.parquet'
    rows = _parquet_rows(path) if is_parquet else _json_rows(path)
    for number, fields in rows:
      with _explain(path, number):
        task = _search_r1_task(fields, number) if is_parquet else _task(fields)
        if is_parquet and (task.id, task.split) in seen:  # such rows have no id of their own
          task = dataclasses.replace(task, id=f'{task.id}-{path.stem}-{number}')
        check_task(task, seen)
      tasks.append(task)
  chosen = [task for task in tasks if task.split in (split, '')]
  if not chosen:
    known = ', '.join(sorted({task.split for task in tasks})) or 'none, the file is empty'
    raise types.UserError(f'{source}: no question of split {split!r}; splits there: {known}.')
  return chosen


def check_types(task: types.Task) -> None:
  """Raises ValueError for a task of a user's function whose texts have other types."""
  if not isinstance(task, types.Task):
    raise ValueError('a stppo_jax.types.Task is needed')
  kinds = {'id': str, 'question': str, 'answers': tuple[str, ...] | list[str]}
  for name, kind in kinds.items():
    _check_type(name, getattr(task, name), kind)


def check_task(task: types.Task, seen: set[tuple[str, str]]) -> None:
  """Raises ValueError for a task that cannot be played; adds its id and split to `seen`."""
  letters = dict(task.options)
  if letters and task.letter not in letters:
    raise ValueError(f'the right option is {task.letter!r}: one of {", ".join(letters)} is needed')
  if not all(answer.strip() for answer in task.answers):
    raise ValueError(
        f"field 'answers' is {task.answers!r}: an answer without a text, which an empty answer "
        'would match: leave it out'
    )
  if task.dataset in ('all', 'macro'):
    raise ValueError(
        f"field 'dataset' is {task.dataset!r}, as a mean over all data sets is called: give "
        'another name'
    )
  if task.hops < 0:
    raise ValueError(f"field 'hops' is {task.hops}: 0 (unknown) or more is needed")
  if (task.id, task.split) in seen:
    raise ValueError(f"field 'id' is {task.id!r} a second time: ids must be unique in a split")
  seen.add((task.id, task.split))


def warn_of_overlap(to_train_on: Sequence[types.Task], held_out: Sequence[types.Task]) -> None:
  """Logs a warning if questions are trained on and held out at once."""
  train_questions = {task.question for task in to_train_on}
  common = train_questions & {task.question for task in held_out}
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
  paths = [_find(part, 'corpus.jsonl') for part in folders or parts]
  passages: dict[str, types.Passage] = {}
  for path in paths:
    for number, fields in _json_rows(path):
      with _explain(path, number):
        passage = _passage(fields)
        if passage.id in passages:
          raise ValueError(f"field 'id' is {passage.id!r} a second time: ids must be unique")
      passages[passage.id] = passage
  if not passages:
    raise types.UserError(f'{source}: no passages; one JSON object per line is needed.')
  return list(passages.values())


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
    self._tasks = list(tasks)
    self._batch = batch
    self._seed = seed

  def take(self, step: int) -> list[types.Task]:
    """Returns the questions of update `step`, counted from 0."""
    size = len(self._tasks)
    start = step * self._batch
    positions = range(start, start + self._batch)
    taken = []
    for epoch, part in itertools.groupby(positions, lambda position: position // size):
      generator = np.random.default_rng((self._seed, epoch))
      order = generator.permutation(size)
      taken += [self._tasks[order[position % size]] for position in part]
    return taken

  def further(self, step: int, attempt: int, count: int, used: Collection[str]) -> list[types.Task]:
    """Returns `count` more questions for update `step`, at its attempt 1, 2, ...

    They do not depend on earlier updates and do not move the order of `take`. Ids in `used` are
    left out as long as there are others.
    """
    generator = np.random.default_rng((self._seed, step, attempt))
    order = [self._tasks[i] for i in generator.permutation(len(self._tasks))]
    fresh = [task for task in order if task.id not in used]
    pool = itertools.cycle(fresh or order)
    return list(itertools.islice(pool, count))

  def by_id(self) -> dict[str, types.Task]:
    """Returns all questions by their ids."""
    return {task.id: task for task in self._tasks}


def _shown(value) -> str:
  """Returns a value for a message; a long one in part."""
  text = repr(value)
  if len(text) <= 200:
    return text
  return f'{text[:200]}..'


@contextlib.contextmanager
def _explain(path: pathlib.Path, number: int) -> Iterator[None]:
  """Gives an error about a row its place."""
  try:
    yield
  except KeyError as error:
    raise types.UserError(f'{path}:{number}: {error.args[0]!r} is missing') from error
  except (ValueError, TypeError) as error:
    raise types.UserError(f'{path}:{number}: {error}') from error


def _get(fields: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
  """Returns a field of a row, of this type. ValueError: it has another, or is missing."""
  value = fields.get(name)
  if value is None:
    value = default
  if value is None:
    raise ValueError(f'field {name!r} is missing: must be {types.described(kind)}')
  _check_type(name, value, kind)
  return value


def _check_type(name: str, value: Any, kind: Any) -> None:
  if not types.is_of(value, kind):
    raise ValueError(f'field {name!r} is {_shown(value)}: must be {types.described(kind)}')


def _text(fields: Mapping[str, Any], name: str) -> str:
  """Returns a field with a text."""
  text = _get(fields, name, str)
  if not text.strip():
    raise ValueError(f'field {name!r} is empty: a text is needed')
  return text


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
  if file_name == 'qa.jsonl' and path.suffix not in ('.jsonl', '.parquet'):
    raise types.UserError(f'{path}: a file of type .jsonl or .parquet is needed.')
  if file_name == 'corpus.jsonl' and path.suffix != '.jsonl':
    raise types.UserError(
        f'{path}: a .parquet holds questions, and passages are needed: set '
        '--config.data.corpus=FOLDER or a .jsonl file, or --config.retriever.kind=http'
    )
  return path


def _json_rows(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
  """Yields the number and the fields of each row."""
  with open(path, 'rb') as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      with _explain(path, number):
        try:
          fields = json.loads(line.decode('utf-8-sig'))
        except (ValueError, RecursionError) as error:
          raise ValueError(f'not JSON in UTF-8 ({error})') from error
        if not isinstance(fields, dict):
          raise ValueError('one JSON object per line is needed')
      yield number, fields


def _parquet_rows(path: pathlib.Path) -> Iterable[tuple[int, dict]]:
  """Returns the number and the fields of each row."""
  import pyarrow
  from pyarrow import parquet

  try:
    file = parquet.ParquetFile(path)
    present = [name for name in _PARQUET_COLUMNS if name in file.schema_arrow.names]
    rows = file.read(columns=present).to_pylist()
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise types.UserError(f'{path}: not a parquet file ({reason}).') from None
  return enumerate(rows, start=1)


def _passage(fields: Mapping[str, Any]) -> types.Passage:
  passage_id = str(_get(fields, 'id', str | int))
  if 'contents' in fields and 'text' not in fields:
    return types.Passage(passage_id, *read_contents(_text(fields, 'contents')))
  return types.Passage(passage_id, _text(fields, 'title'), _text(fields, 'text'))


def _task(fields: Mapping[str, Any]) -> types.Task:
  options = _get(fields, 'options', dict[str, str], {})
  letter = ''
  answers = None
  if options:
    letter = _text(fields, 'answer')
    answers = [options.get(letter, '')]
  answers = _get(fields, 'answers', list[str], answers)
  if not answers:
    raise ValueError("field 'answers' is empty: at least one text is needed")
  steps = _get(fields, 'steps', list[dict[str, str]], [])
  gold = _get(fields, 'gold', list[str], [])
  return types.Task(
      id=str(_get(fields, 'id', str | int)),
      question=_text(fields, 'question'),
      answers=tuple(answers),
      dataset=_get(fields, 'dataset', str, 'unnamed'),
      split=_get(fields, 'split', str, ''),
      hops=_get(fields, 'hops', int, 0),
      gold=tuple(gold),
      options=tuple(sorted(options.items())),
      letter=letter,
      steps=tuple((step['q'], step['a']) for step in steps),
  )


def _search_r1_task(fields: Mapping[str, Any], number: int) -> types.Task:
  """Makes a Task of Search-R1's columns; the question is a column or the end of the prompt."""
  target = _get(fields, 'reward_model', dict).get('ground_truth')
  if isinstance(target, dict):
    target = target.get('target')
  if isinstance(target, str):
    target = [target]
  if not target or not types.is_of(target, list[str]):
    raise ValueError(
        f"field 'reward_model' has ground_truth {_shown(target)}: a text or "
        '{"target": [texts]} is needed'
    )
  extra = _get(fields, 'extra_info', dict, {})
  dataset = _get(fields, 'data_source', str, 'unnamed')
  split = extra.get('split') or ''
  index = extra.get('index')
  if index is None:
    index = number - 1
  return types.Task(
      id=f'{dataset}-{split}-{index}',
      question=_search_r1_question(fields),
      answers=tuple(target),
      dataset=dataset,
      split=split,
  )


def _search_r1_question(fields: Mapping[str, Any]) -> str:
  """Returns the question: a column, or the text after the prompt's last line 'Question:'.

  Without such a line it is the text after the first 'Question:', because a question may hold the
  word itself, or else the whole prompt.
  """
  if fields.get('question') is not None:
    return _text(fields, 'question').strip()
  messages = _get(fields, 'prompt', list[dict])
  contents = [m.get('content') for m in messages if m.get('role') == 'user']
  if not contents or not isinstance(contents[-1], str):
    raise ValueError(f'field \'prompt\' is {_shown(messages)}: a text of role "user" is needed')
  question = contents[-1]
  lines = list(re.finditer(r'^Question:', question, re.MULTILINE))
  if lines:
    question = question[lines[-1].end() :]
  elif 'Question:' in question:
    question = question.partition('Question:')[2]
  question = question.strip()
  if not question:
    raise ValueError('field \'prompt\' has no question: a message of role "user" is needed')
  return question
