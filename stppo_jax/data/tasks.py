"""Questions and passages from files: rows in, Tasks and Passages out, and the order of training.

A source is `embedded` (the knowledge set of the package), a folder with qa.jsonl and corpus.jsonl,
a file, or a folder of files; several are separated by commas. This module reads the columns of our
own files, and public_formats.py those of published question sets. A row that cannot be used is an
error with its file, line and column.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import itertools
import os
import pathlib
import re
import types as types_lib
from typing import Any
from typing import NamedTuple

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.data import row_files

EMBEDDED = pathlib.Path(__file__).parent.parent / 'assets' / 'knowledge'

_DOWNLOAD = (
    ' `hf download --repo-type dataset PeterJinGo/nq_hotpotqa_train --local-dir=data` downloads '
    "Search-R1's train.parquet and test.parquet."
)
_PASSAGE_IDS = ('id', '_id', 'id_', 'pid', 'passage_id', 'docid', 'doc_id')
_PASSAGE_TEXTS = ('text', 'content', 'contents', 'page_content', 'passage', 'segment', 'body')
_OWN_COLUMNS = ('answers', 'gold', 'hops', 'steps', 'title', 'wikipedia_title', 'meta', 'metadata')
_NO_COLUMNS: Mapping[str, Any] = types_lib.MappingProxyType({})
_CORPUS = 'corpus'  # the stem of a folder's file of passages
# Files and folders of a set that hold its questions, as of BEIR and MS MARCO.
_QUERIES = re.compile(r'(quer(y|ies)|questions|qrels|topics|qas)(?![a-z]).*')
# A split in the name of a file: train-00000-of-00002.parquet, hotpot_dev_distractor_v1.json.
_SPLIT_IN_NAME = re.compile(r'(?<![a-z])(train|dev|validation|valid|val|test)(?![a-z])')
_OTHER_NAMES = {'validation': 'dev', 'valid': 'dev', 'val': 'dev'}


class Loaded(NamedTuple):
  """The questions of a source."""

  tasks: list[types.Task]
  unanswered: list[str]  # rows that cannot be scored, with their place and the reason
  readings: dict[pathlib.Path, str]  # how each file was read


class _Loaded(NamedTuple):
  """What a row of a file of questions holds."""

  row: row_files.FileRow
  task: types.Task | None  # None: the row has no answer
  passages: Sequence[types.Passage] = ()  # those that come with the question
  reason: str = ''  # why there is no task
  has_id: bool = True  # whether the file names the row


def load_tasks(
    source: str, split: str, columns: Mapping[str, object] = _NO_COLUMNS
) -> list[types.Task]:
  """Loads the questions of a split from `embedded`, folders and files.

  `columns` are those of config.data.columns, if the user names them.

  `validation`, `valid` and `val` are other names of the split `dev`. If the names of several files
  say different splits, the rows of each file belong to its own. Any other row without a split
  belongs to every split. Rows without an answer are left out, and counted in the log.
  """
  loaded = load_all(source, columns)
  tasks = loaded.tasks
  unanswered = loaded.unanswered
  num_rows = len(tasks) + len(unanswered)
  if unanswered:
    row_files.log_once(
        f'{len(unanswered)} of {num_rows} rows cannot be scored and are left out: {unanswered[0]}'
    )
  for path, text in loaded.readings.items():
    row_files.log_once(f'{path}: read as {text}')
  if loaded.readings:
    counts = collections.Counter(task.split or 'every split' for task in tasks)
    numbers = ', '.join(f'{name} {number}' for name, number in counts.items())
    row_files.log_once(f'{source}: {len(tasks)} questions ({numbers})')
  if chosen := _of_split(tasks, split):
    return chosen
  if not tasks and unanswered:
    raise types.UserError(f'none of {num_rows} rows can be scored: {unanswered[0]}')
  known = ', '.join(sorted({task.split for task in tasks})) or 'none, the file is empty'
  raise types.UserError(
      f'{source}: no question of split {split!r}; splits there: {known}. --config.data.train_split '
      'and --config.data.eval_split name others'
  )


def load_all(source: str, columns: Mapping[str, object] = _NO_COLUMNS) -> Loaded:
  """Loads the questions of all splits."""
  if columns and 'question' not in columns:
    raise types.UserError(
        f"config.data.columns={dict(columns)!r} names no question: give 'question' and 'answers'"
    )
  paths = _question_paths(source)
  split_by_path = _splits_of_names(paths)
  tasks: list[types.Task] = []
  seen: set[tuple[str, str]] = set()
  unanswered: list[str] = []
  readings: dict[pathlib.Path, str] = {}
  contents = _Contents()
  for path in paths:
    seen_in_file: set[tuple[str, str]] = set()
    start = len(tasks)
    for loaded in _questions(path, columns, readings):
      task = loaded.task
      if task is None:
        unanswered.append(f'{path}:{loaded.row.number}: {loaded.reason}')
        continue
      if not task.split:
        task = dataclasses.replace(task, split=split_by_path.get(path, ''))
      key = (task.id, task.split)
      if key in seen and not (loaded.has_id and key in seen_in_file):
        task = dataclasses.replace(task, id=f'{task.id}-{path.stem}-{loaded.row.number}')
      with row_files.explain(path, loaded.row.number):
        check_task(task, seen)
      seen_in_file.add(key)
      tasks.append(task)
    if len(paths) > 1:
      contents.add(path, tasks[start:])
  return Loaded(tasks, unanswered, readings)


class _Contents:
  """The questions of several files, none of which may hold all those of another one."""

  def __init__(self) -> None:
    self._places: dict[Any, pathlib.Path] = {}  # by question, the first file with it
    self._sizes: dict[pathlib.Path, int] = {}  # the number of distinct questions

  def add(self, path: pathlib.Path, tasks: Sequence[types.Task]) -> None:
    """Adds the questions of a file. UserError: it has those of an earlier file, or the reverse."""
    keys = {(task.question, task.answers, task.options, task.split) for task in tasks}
    common = collections.Counter(self._places[key] for key in keys if key in self._places)
    for other, number in common.items():
      if number in (len(keys), self._sizes[other]):
        raise types.UserError(
            f'{path}: {number} questions are those of {other}, and each would be asked twice: give '
            'one of the two files'
        )
    self._sizes[path] = len(keys)
    for key in keys:
      self._places.setdefault(key, path)


def _of_split(tasks, split):
  """Returns the tasks of a split, or else of its other name, and those without a split."""
  chosen = [task for task in tasks if task.split in (split, '')]
  if any(task.split for task in chosen):
    return chosen
  other = _OTHER_NAMES.get(split, split)
  return [task for task in tasks if _OTHER_NAMES.get(task.split, task.split) in (other, '')]


def files_of(source: str) -> dict[pathlib.Path, str]:
  """Returns {file of a source of rows: the split of its name, if the names say different ones}."""
  paths = _question_paths(source)
  splits = _splits_of_names(paths)
  return {path: splits.get(path, '') for path in paths}


def same_split(name: str, asked: str) -> bool:
  """Returns whether two names mean the same split."""
  return _OTHER_NAMES.get(name, name) == _OTHER_NAMES.get(asked, asked)


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


def digest(rows: Sequence[types.Task] | Sequence[types.Passage]) -> str:
  """Returns a digest of all fields of tasks or passages, in order.

  It takes about a tenth of the time that reading them takes.
  """
  sha = hashlib.sha256()
  for i, row in enumerate(rows):
    separator = '\n' if i else ''
    sha.update(f'{separator}{row!r}'.encode(errors='surrogatepass'))
  return sha.hexdigest()[:16]


def load_corpus(source: str, columns: Mapping[str, object] = _NO_COLUMNS) -> list[types.Passage]:
  """Loads the passages: `embedded`, folders with a file `corpus`, or files.

  Rows are {"id", "title", "text"} or Search-R1's {"id", "contents"}, see `read_contents`. Of
  several sources the folders with a corpus count: the others hold questions. Without such a folder,
  the passages that come with the questions are the corpus, as those of HotpotQA.
  """
  parts = _parts(source)
  paths = [path for part in parts for path in _corpus_paths(part)]
  passages: dict[str, types.Passage] = {}
  num_of_questions = 0
  num_questions = 0
  empty: list[str] = []
  queries = set() if paths else _query_files(parts)
  for path in paths or _question_paths(source):
    for row, of_questions in _passage_rows(path, columns):
      if of_questions is not None:
        num_questions += 1
        num_of_questions += len(of_questions)
        passages |= {passage.id: passage for passage in of_questions}
        continue
      if path in queries:
        row_files.log_once(f'{path}: holds questions by its name, and is no file of passages')
        continue
      with row_files.explain(path, row.number):
        passage = _passage(row)
        if passage is None:
          empty.append(f'{path}:{row.number}')
          continue
        if passage.id in passages:
          raise ValueError(f"field 'id' is {passage.id!r} a second time: ids must be unique")
      passages[passage.id] = passage
  if empty:
    row_files.log_once(f'{len(empty)} passages without a text are left out: {empty[0]}')
  if num_of_questions:
    row_files.log_once(
        f'searches find the {len(passages)} passages that come with the {num_questions} questions '
        f'of {source}: --config.data.corpus names a larger corpus'
    )
  if not passages and num_questions:
    raise types.UserError(
        f'{source}: holds questions, and no passages come with them: set '
        '--config.data.corpus=FOLDER or a file of passages, or --config.retriever.kind=http'
    )
  if not passages:
    raise types.UserError(f'{source}: no passages; one JSON object per line is needed.')
  return list(passages.values())


def read_contents(contents: str, own_title: object = None) -> tuple[str, str]:
  """Returns (title, text) of Search-R1's `contents`: a title in quotes, a newline, the text.

  A single line is a text without a title. `own_title` is the value of a separate field. If it is a
  title, then contents that begin with neither this title nor one in quotes are the text.
  """
  own = own_title.strip() if isinstance(own_title, str) else ''
  title, newline, text = contents.partition('\n')
  if not newline:
    return own, contents.strip()
  title = title.strip()
  is_quoted = len(title) > 1 and title[0] == title[-1] == '"'
  if is_quoted:
    title = title[1:-1]
  elif own and own != title:
    return own, contents.strip()
  return title, text.strip()


def write_contents(passage: types.Passage) -> str:
  """Inverts `read_contents`."""
  if not passage.title and '\n' not in passage.text:
    return passage.text
  return f'"{passage.title}"\n{passage.text}'


def in_epochs(size: int, batch: int, seed: int, number: int) -> list[int]:
  """Returns the indices of batch `number`, counted from 0, in an endless order without state.

  Each epoch is a permutation of range(size) that depends on (seed, epoch) alone. A batch may cross
  the end of an epoch.
  """
  positions = range(number * batch, (number + 1) * batch)
  taken: list[int] = []
  for epoch, part in itertools.groupby(positions, lambda position: position // size):
    order = np.random.default_rng((seed, epoch)).permutation(size)
    taken += [int(order[position % size]) for position in part]
  return taken


class TaskStream:
  """An endless order of questions without state: resuming at update n is `take(n)`."""

  def __init__(self, tasks: list[types.Task], batch: int, seed: int):
    self._tasks = list(tasks)
    self._batch = batch
    self._seed = seed

  def take(self, update: int) -> list[types.Task]:
    """Returns the questions of update `update`, counted from 0."""
    indices = in_epochs(len(self._tasks), self._batch, self._seed, update)
    return [self._tasks[i] for i in indices]

  def further(
      self, update: int, attempt: int, replaced: Sequence[types.Task], used: Collection[str]
  ) -> list[types.Task]:
    """Returns a question in place of each of `replaced` of update `update`, at attempt 1, 2, ...

    They do not depend on earlier updates and do not move the order of `take`. Ids in `used` are
    left out as long as there are others.
    """
    generator = np.random.default_rng((self._seed, update, attempt))
    order = [self._tasks[i] for i in generator.permutation(len(self._tasks))]
    fresh = [task for task in order if task.id not in used]
    pool = itertools.cycle(fresh or order)
    return list(itertools.islice(pool, len(replaced)))

  def by_id(self) -> dict[str, types.Task]:
    """Returns all questions by their ids."""
    return {task.id: task for task in self._tasks}


def _get(fields: Mapping[str, object], name: str, kind: object, default: object = None) -> Any:
  """Returns a field of a row, of this type. ValueError: it has another, or is missing."""
  value = fields.get(name)
  if value is None:
    value = default
  if value is None:
    raise ValueError(f'field {name!r} is missing: must be {types.described(kind)}')
  _check_type(name, value, kind)
  return value


def _check_type(name: str, value: object, kind: object) -> None:
  if not types.is_of(value, kind):
    raise ValueError(f'field {name!r} is {types.shown(value)}: must be {types.described(kind)}')


def _text(fields: Mapping[str, object], name: str) -> str:
  """Returns a field with a text."""
  text = _get(fields, name, str)
  if not text.strip():
    raise ValueError(f'field {name!r} is empty: a text is needed')
  return text


def _parts(source: str) -> list[str]:
  """Splits a source at its commas; a path that has one is a single source."""
  parts = [source] if os.path.exists(source) else source.split(',')
  return [part.strip() for part in parts]


def _question_paths(source: str) -> list[pathlib.Path]:
  """Returns the files with questions: a folder has qa.jsonl, or else its files count."""
  paths: list[pathlib.Path] = []
  for part in _parts(source):
    path = _path(part)
    own = path / 'qa.jsonl'
    if not path.is_dir() or own.is_file():
      paths.append(_checked(own if path.is_dir() else path))
      continue
    files = row_files.in_folder(path)
    if not files:
      _checked(own)
    paths += files
  return paths


def _corpus_paths(part: str) -> list[pathlib.Path]:
  """Returns the files of passages in a folder: its file or its folder `corpus`.

  []: it has none, or the part is a file.
  """
  folder = _path(part)
  if not folder.is_dir():
    return []
  for place in (folder, folder / _CORPUS):  # the hub has the files of BEIR in folders
    files = filter(row_files.has_known_suffix, sorted(place.glob(f'{_CORPUS}.*')))
    if first := next((path for path in files if path.is_file()), None):
      return [first]
  if (folder / _CORPUS).is_dir():
    return row_files.in_folder(folder / _CORPUS)
  if (folder / 'qa.jsonl').is_file() and part == 'embedded':
    return [_checked(folder / f'{_CORPUS}.jsonl')]
  return []


def _query_files(parts: Sequence[str]) -> set[pathlib.Path]:
  """Returns the files of folders that hold questions by their names, or by those of folders."""
  paths = set()
  for folder in filter(pathlib.Path.is_dir, map(_path, parts)):
    for path in row_files.in_folder(folder):
      names = path.relative_to(folder).parts
      if any(_QUERIES.fullmatch(name.lower()) for name in names):
        paths.add(path)
  return paths


def _path(part: str) -> pathlib.Path:
  return EMBEDDED if part == 'embedded' else pathlib.Path(part).expanduser()


def _checked(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of an existing file. UserError: there is none, or it has another format."""
  if not path.is_file():
    hint = _DOWNLOAD if path.suffix == '.parquet' else ''
    raise types.UserError(
        f'{path}: no such file; give "embedded", a folder with qa.jsonl and corpus.jsonl, or a '
        f'file.{hint}'
    )
  if not row_files.has_known_suffix(path):
    raise types.UserError(
        f'{path}: a file of type {", ".join(row_files.SUFFIXES)} is needed, also with .gz.'
    )
  return path


def _split_in(name: str) -> str:
  """Returns the split that the name of a file or folder says, or ''."""
  names = {*_SPLIT_IN_NAME.findall(name.lower())}
  return names.pop() if len(names) == 1 else ''


def _splits_of_names(paths: Sequence[pathlib.Path]) -> dict[pathlib.Path, str]:
  """Returns the splits that the names of several files, or of their folders, say if they differ."""
  splits = {path: _split_in(path.name) for path in paths}
  if not any(splits.values()):  # the Parquet files that the hub converts: train/0000.parquet
    splits = {path: _split_in(path.parent.name) for path in paths}
  splits = {path: split for path, split in splits.items() if split}
  if len({_OTHER_NAMES.get(name, name) for name in splits.values()}) < 2:
    return {}
  row_files.log_once(
      'the names of the files say the splits of rows without one: '
      + ', '.join(f'{path}: {name}' for path, name in splits.items())
  )
  return splits


def _questions(
    path: pathlib.Path, columns: Mapping[str, object], readings: dict[pathlib.Path, str]
) -> Iterator[_Loaded]:
  """Yields what each row of a file of questions holds, and notes how the file is read."""
  reader: Any = None  # a public_formats.SetReader
  is_own = _is_embedded(path)
  for row in row_files.read(path, _columns(path, columns)):
    if reader is None and not is_own:
      reader = _public_formats().SetReader(path, columns)
      readings[path] = reader.reading.described()
      is_own = reader.is_own
    if not is_own:
      for question in reader.read(row):
        yield _Loaded(row, *question)
      continue
    with row_files.explain(path, row.number):
      reason = reader.unusable(row.fields) if reader is not None else ''
      task = None if reason else _task(row.fields, f'{path.name.partition(".")[0]}-{row.number}')
    yield _Loaded(row, task, reason=reason, has_id='id' in row.fields)


def _passage_rows(
    path: pathlib.Path, columns: Mapping[str, object]
) -> Iterator[tuple[row_files.FileRow, Sequence[types.Passage] | None]]:
  """Yields the rows of a file, with the passages of those that are questions."""
  reader = None
  for row in row_files.read(path, _columns(path, columns)):
    is_passage = {'text', 'contents'} & row.fields.keys() and 'question' not in row.fields
    if is_passage or not _public_formats().is_question(row.fields, columns):
      yield row, None
      continue
    if reader is None:
      reader = _public_formats().SetReader(path, columns)
    if reader.is_own:
      yield row, ()
    else:
      for question in reader.read(row):
        yield row, question.passages


def _columns(path: pathlib.Path, columns: Mapping[str, object]) -> tuple[str, ...]:
  """Returns the columns to read of a Parquet file, whose others may be large."""
  if not path.name.endswith('.parquet'):
    return ()
  known = _public_formats().known_columns(columns)
  return (*_OWN_COLUMNS, *_PASSAGE_IDS, *_PASSAGE_TEXTS, *known)


def _is_embedded(path: pathlib.Path) -> bool:
  return path.parent == EMBEDDED


def _public_formats() -> types_lib.ModuleType:
  from stppo_jax.data import public_formats  # the questions of the package need none of it

  return public_formats


def _passage(row: row_files.FileRow) -> types.Passage | None:
  """Returns the passage of a row of a corpus; None: it is empty. ValueError: it has no text."""
  fields = row.fields
  own_id = _first(fields, _PASSAGE_IDS)
  if own_id is None:
    passage_id = row.key or f'{row.path.name.partition(".")[0]}-{row.number}'
  else:
    passage_id = str(_get(fields, own_id, str | int))
  name = _first(fields, _PASSAGE_TEXTS)
  if name is None:
    raise ValueError(
        f"field 'text' is missing: one of {', '.join(_PASSAGE_TEXTS)} is needed, and not only "
        f'{", ".join(list(fields)[:12])}'
    )
  texts = _get(fields, name, str | list[str])
  text = texts if isinstance(texts, str) else ' '.join(map(str.strip, texts))
  title_name = _first(fields, ('title', 'wikipedia_title'))
  if name == 'contents':
    title, text = read_contents(text, fields[title_name] if title_name else None)
  else:
    title = _get(fields, title_name, str) if title_name else _title_of_metadata(fields)
  return types.Passage(passage_id, title, text) if text.strip() or title.strip() else None


def _first(fields: Mapping[str, object], names: Sequence[str]) -> str | None:
  """Returns the first of these names whose field has a value, and no NaN as pandas writes."""
  for name in names:
    value = fields.get(name)
    if value is not None and value == value:
      return name
  return None


def _title_of_metadata(fields: Mapping[str, Any]) -> str:
  """Returns the title in the metadata of a document (LangChain, LlamaIndex, Haystack), or ''."""
  name = _first(fields, ('metadata', 'meta'))
  title = fields[name].get('title') if name and isinstance(fields[name], dict) else None
  return title if isinstance(title, str) else ''


def _task(fields: Mapping[str, object], default_id: str) -> types.Task:
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
      id=str(_get(fields, 'id', str | int, default_id)),
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
