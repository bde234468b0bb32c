"""The columns of a file of questions: their values, and what their names may mean."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
import re
from typing import Any
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.data import layout_values as values_lib
from stppo_jax.data import layouts
from stppo_jax.data import row_files
from stppo_jax.data.layouts import SetLayout

IDS = ('id', '_id', 'question_id', 'QuestionId', 'qid', 'pubid')

SPLITS = ('split', 'extra_info.split', 'metadata.split')

DATASETS = ('data_source', 'dataset', 'extra_info.data_source', 'metadata.data_source')

PASSAGES = (
    *('context', 'paragraphs', 'CONTEXTS', 'passage', 'article', 'flores_passage'),
    *('metadata.context', 'metadata.paragraphs', 'metadata.metadata.paragraphs'),
)

FACTS = ('supporting_facts', 'metadata.supporting_facts')

STEPS = tuple(f'{outer}question_decomposition' for outer in ('', 'metadata.', 'metadata.metadata.'))

IMAGES = ('images', 'image', 'image_1', 'Picture')

QUESTIONS = tuple(
    dict.fromkeys(name for layout in layouts.LAYOUTS for name in layout.question.split('|'))
)

COMMON = (*IDS, *SPLITS, *DATASETS, *FACTS, *STEPS, *IMAGES, *values_lib.STATES, values_lib.ALIASES)

# The name of a column that may hold the answer, whatever its values are.
_ANSWER_NAME = re.compile(
    r'answer|correct|truth|solution|gold|target|expected|referenc|respons|predict'
    r'|(?<![a-z])(span|ans|right|output|completion|result|final|reply|revised|chosen|best|winner|gt'
    r'|human$)(?![a-z])'
)

OPTION_NAME = re.compile('option|choice|candidate|alternative|distractor|ending|incorrect|wrong')

# Words in the name of a column that may name the answer if its values look like it.
_POSITION_WORDS = frozenset('label labels key idx index num number no choice option'.split())

# A column whose name ends with such a word describes an answer.
_ABOUT_WORDS = frozenset(
    'type types start starts end count url source language length format level date score scores '
    'rating time explanation reason rationale'.split()
)

# Words in the name of a column without which a question may not be understood.
_CONTEXT_WORDS = frozenset(
    'context contexts passage passages paragraph paragraphs article articles table tables story '
    'document documents narrative premise puzzle background dialogue dialog conversation scenario '
    'ctx text texts body sentence sentences hint history abstract transcript excerpt chapter '
    'review tweet email schema stimulus situation'.split()
)

# A column whose name has such a word explains an answer.
_EXPLAINING_WORDS = frozenset(
    'explanation explanations exp explain reason reasons reasoning rationale rationales cot '
    'thought thoughts thinking proof proofs derivation generation generations generated trace '
    'traces critique feedback canary'.split()
)

_SHARE_WORDS = frozenset(
    'rate rates percentage ratio share accuracy num number count counts'.split()
)

_NAME_WORDS = frozenset('id ids title name number index key'.split())

_NUMERALS = (
    ('one', 'two', 'three', 'four', 'five'),
    ('first', 'second', 'third', 'fourth', 'fifth'),
)

_MEDIA_WORDS = frozenset('image images picture video audio figure diagram photo'.split())

_QUESTION_NAMES = frozenset('question query problem prompt instruction input goal'.split())

# A letter, several ones, or a number, which may name options.
BARE = re.compile(r'\(?[A-Za-z]\)?[.)]?|[A-J]{2,}|[A-J](, ?[A-J])+|-?[0-9]+|op[a-e]')

_SHORTEST_CONTEXT = 40  # characters of a text that a question may need

_SHORTEST_PROSE = 80  # characters of a text that explains an answer, and names none

_MOST_NAMES = 400  # columns, with the keys of nested ones

_DEPTH = 4  # levels of nested columns


@dataclasses.dataclass
class ColumnFacts:
  """What the values of a column are, over all rows of a file."""

  num: int = 0  # values that are not empty
  num_texts: int = 0
  num_prose: int = 0  # texts that are too long for an answer
  num_ids: int = 0  # texts with a digit and without a space
  num_lists: int = 0  # lists or dicts of at least two texts
  num_numbers: int = 0  # numbers and truths

  def add(self, value: object) -> None:
    """Counts a value that is not empty."""
    self.num += 1
    if isinstance(value, str):
      self.num_texts += 1
      self.num_prose += len(value) >= _SHORTEST_PROSE or '\n' in value.strip()
      self.num_ids += bool(re.fullmatch(r'\S*[0-9]\S*', value)) and len(value) > 2
    self.num_lists += len(values_lib.texts_in(value)) > 1
    self.num_numbers += isinstance(value, (int, float))

  @property
  def is_prose(self) -> bool:
    """Whether the values are too long for answers."""
    return self.num_texts == self.num and 2 * self.num_prose >= self.num


class Profile(NamedTuple):
  """The columns of a file of questions."""

  path: pathlib.Path
  names: tuple[str, ...]
  facts: dict[str, ColumnFacts]  # by the columns with a value
  first: row_files.FileRow  # the first row with a question


def questions_of(fields: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
  """Yields the columns of each question of a row: one, or those of an article of SQuAD."""
  if not is_article(fields):
    yield fields
    return
  for paragraph in fields['paragraphs']:
    shared = {'context': paragraph.get('context'), 'title': fields.get('title')}
    for question in paragraph.get('qas') or ():
      yield {**shared, **question}


def is_article(fields: Mapping[str, object]) -> bool:
  """Returns whether a row is an article with paragraphs and their questions (SQuAD)."""
  paragraphs = fields.get('paragraphs')
  if not isinstance(paragraphs, list) or not types.is_of(paragraphs, list[dict]):
    return False
  return bool(paragraphs) and 'qas' in paragraphs[0]


def names_of(layout: SetLayout) -> list[str]:
  """Returns the columns that a layout names; of a row of option columns, all possible ones."""
  options = [layout.options] if isinstance(layout.options, str) else [*layout.options]
  names = [layout.question, *layout.answers, *layout.wrong, *layout.needs]
  if layout.is_family:
    names = [name for alternatives in names for name in alternatives.split('|')]
    options = options[0].split('|')
  for option in options:
    names.append(option)
    if option.endswith('..'):
      names += [option[:-3] + chr(ord(option[-3]) + i) for i in range(12)]
  names += [layout.before, layout.flag, layout.id, layout.split, layout.passages]
  return list(filter(None, names))


def rows(
    path: pathlib.Path, columns: Sequence[str]
) -> Iterator[tuple[row_files.FileRow, Mapping[str, object]]]:
  """Yields (row, columns of a question in it)."""
  for row in row_files.read(path, columns):
    for fields in questions_of(row.fields):
      yield row, fields


def light_columns(path: pathlib.Path) -> tuple[str, ...]:
  """Returns the columns of a table without those that hold whole articles; (): all of them."""
  if not path.name.endswith('.parquet'):
    return ()
  for first in row_files.read(path, ('',)):
    return tuple(name for name in first.fields if name not in layouts.HEAVY)
  return ()


def profile_of(path: pathlib.Path, columns: Sequence[str]) -> Profile:
  """Reads a file. UserError: it has no row."""
  names: dict[str, None] = {}
  facts: dict[str, ColumnFacts] = {}
  first: row_files.FileRow | None = None
  for row, fields in rows(path, columns):
    first = first or row._replace(fields=dict(fields))
    for name, value in _leaves(fields):
      if len(names) < _MOST_NAMES:
        names[name] = None
      if name in names and not values_lib.is_empty(value):
        facts.setdefault(name, ColumnFacts()).add(value)
  if first is None:
    raise types.UserError(f'{path}: holds no question')
  return Profile(path, tuple(names), facts, first)


def _leaves(fields, prefix='', depth=0):
  """Yields (name, value) of the columns of a row and of the keys of nested ones."""
  for key, value in fields.items():
    name = f'{prefix}{key}'
    is_object = isinstance(value, str) and value.lstrip()[:1] == '{'
    inner = values_lib.value_of(value) if is_object else value
    yield name, inner
    if isinstance(inner, dict) and depth < _DEPTH:
      yield from _leaves(inner, f'{name}.', depth + 1)


def words_of(name: str) -> list[str]:
  """Returns the words of the last part of a column's name, in lower case."""
  parts = re.findall('[A-Z]?[a-z]+|[A-Z]+|[0-9]+', name.rpartition('.')[2])
  return [part.lower() for part in parts]


def is_answer_name(name: str) -> bool:
  """Returns whether a column may hold the answer, whatever its values are."""
  last = name.rpartition('.')[2].lower()
  return bool(_ANSWER_NAME.search(last)) and not _is_about(name)


def is_share(name: str) -> bool:
  """Returns whether a column counts something, as the share of a model's answers."""
  return not _SHARE_WORDS.isdisjoint(words_of(name))


def has_letters(text: str) -> bool:
  """Returns whether a text shows options with the letters A and B before them."""
  return all(re.search(rf'(?<!\w)\(?{letter}[).:]', text) for letter in 'AB')


def _is_about(name):
  words = words_of(name)
  return bool(words) and words[-1] in _ABOUT_WORDS


def may_name_answer(name: str) -> bool:
  """Returns whether a column may name the answer, perhaps by a position."""
  is_position = bool(_POSITION_WORDS.intersection(words_of(name))) and not _is_about(name)
  return is_answer_name(name) or is_position


def is_media(name: str) -> bool:
  """Returns whether a column may hold images, videos or sounds."""
  return not _MEDIA_WORDS.isdisjoint(words_of(name))


def may_be_context(name: str, facts: ColumnFacts) -> bool:
  """Returns whether a question may not be understood without a column."""
  words = set(words_of(name))
  if is_media(name):
    return True
  is_question = '.' not in name and name.lower() in _QUESTION_NAMES
  is_name = _is_about(name) or words_of(name)[-1:] and words_of(name)[-1] in _NAME_WORDS
  is_context = is_question or words & _CONTEXT_WORDS and not is_name
  return bool(facts.num > facts.num_numbers and is_context)


def explains_answer(name: str) -> bool:
  """Returns whether the texts of a column are an answer, explain it, or name something."""
  words = words_of(name)
  is_name = bool(words) and words[-1] in _NAME_WORDS
  return is_name or is_answer_name(name) or not _EXPLAINING_WORDS.isdisjoint(words)


def may_hold_context(value: object, question: object) -> bool:
  """Returns whether a value has enough text to be what a question is about.

  The text is longer than the question. Dicts do not count, because their keys are columns, too.
  """
  if isinstance(value, str) and len(value) < _SHORTEST_CONTEXT:
    return False
  value = values_lib.value_of(value)
  if isinstance(value, dict):
    return False
  shortest = max(_SHORTEST_CONTEXT, _num_chars(values_lib.value_of(question)) + 1)
  return _num_chars(value) >= shortest


def _num_chars(value):
  """Returns the number of characters in the texts of a value that have several words.

  Addresses do not count. Words outside ASCII need no spaces, as in Chinese.
  """
  if isinstance(value, str):
    text = re.sub(r'https?://\S+', '', value).strip() if '://' in value else value.strip()
    return 0 if text.isascii() and len(text.split()) < 2 else len(text)
  if isinstance(value, dict):
    value = list(value.values())
  return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def rows_of_columns(names: Sequence[str], present: Sequence[str]) -> list[tuple[str, ...]]:
  """Returns the rows of columns such as a0, a1, a2, opA, opB or one, two, which may hold options.

  At least two columns of a row are among the `present` ones.
  """
  rows = []
  for first in names:
    if first[-1:] in ('0', '1', 'a', 'A') and '.' not in first:
      codes = range(ord(first[-1]), ord(first[-1]) + 10)
      row = itertools.takewhile(names.__contains__, (first[:-1] + chr(code) for code in codes))
      columns = tuple(row)
      if len(set(columns) & set(present)) > 1:
        rows.append(columns)
  for numerals in _NUMERALS:
    ends = {(words_of(name) or [''])[-1]: name for name in names}
    columns = tuple(ends[numeral] for numeral in numerals if numeral in ends)
    if len(set(columns) & set(present)) > 1:
      rows.append(columns)
  return rows
