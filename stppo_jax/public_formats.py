"""Question sets as they are published: the columns of a row in, Tasks and Passages out.

The columns decide what a row is, so no setting names a format. docs/data.md has a table of the
formats. An error names the column of the file. A row without an answer, such as one of a test set,
is read for its passages alone.
"""

import base64
import binascii
from collections.abc import Iterator
from collections.abc import Mapping
import hashlib
import itertools
import pathlib
import re
import string
from typing import Any
from typing import NamedTuple

from stppo_jax import cells
from stppo_jax import row_files
from stppo_jax import types
from stppo_jax.row_files import FileRow
from stppo_jax.types import shown

# The first column of each kind that a row has counts.
_QUESTIONS = (
    'question',
    'Question',
    'QUESTION',
    'problem',
    'Problem',
    'query',
    'Prompt',
    'question_stem',
    'question_text',
)
_BEFORE = ('body', 'Body', 'narrative', 'premise', 'puzzle')  # A text that the question is about.
_IDS = ('id', '_id', 'question_id', 'QuestionId', 'qid', 'pubid')
_ANSWERS = (
    'golden_answers',
    'ground_truth',
    # The short answers of sets whose `answer` may be a whole solution.
    'final_answer',
    'reference_answer',
    'expected_answer',
    'answer_number',
    'possible_answers',
    'answers',
    'answer',
    'Answer',
    'Final answer',
    'Correct Answer',
    'correct_answer',
    'correct_answers',
    'best_answer',
    'final_decision',
)
_OPTIONS = ('options', 'choices', 'Options', 'Choices')
_LETTERS = ('answer_idx', 'answerKey', 'answer_index', 'correct_answer_num', 'correct_option')
_OTHER_LETTERS = ('label', 'correct')  # These may also mean something else.
# The options of a row may have a column each: opa, opb, ..; A, B, ..; option_0, option_1, ..
_OPTION_COLUMNS = tuple(
    tuple(prefix + last for last in lasts)
    for prefix in ('', 'op', 'option', 'option_', 'Option ', 'choice', 'answer', 'mc_answer')
    for lasts in ('ABCDEFGHIJ', 'abcdefghij', '0123456789', '123456789')
    if prefix or lasts.isupper()
)
_PASSAGES = ('context', 'paragraphs', 'CONTEXTS', 'passage', 'article', 'flores_passage')
_IMAGES = ('images', 'image', 'image_1', 'Picture')
_OTHERS = (
    'answer_aliases answerable cop correct_answer_id data_source dataset extra_info file_name '
    'is_impossible messages metadata prompt question_decomposition question_type reward_model '
    'reward_spec split supporting_facts title'
).split()
COLUMNS = (
    *_QUESTIONS,
    *_BEFORE,
    *_IDS,
    *_ANSWERS,
    *_OPTIONS,
    *_LETTERS,
    *_OTHER_LETTERS,
    *itertools.chain.from_iterable(_OPTION_COLUMNS),
    *_PASSAGES,
    *_IMAGES,
    *_OTHERS,
)
_DECISIONS = ('yes', 'no', 'maybe')
_TRUTHS = ('yes', 'no')  # answers to a question of truth
_LETTER = string.ascii_uppercase
_SHORTEST_CODE = 40  # characters of an encrypted question


class Question(NamedTuple):
  """What a row holds."""

  task: types.Task | None  # None: there is no answer
  passages: list[types.Passage]  # those that come with the question
  reason: str = ''  # why there is no task
  has_id: bool = False  # whether the file names the row


class Unanswerable(Exception):
  """A row has no answer. The message names its column."""


class _UnclearNumber(ValueError):
  """The number of an option may count from 0 or from 1."""


SPLITS = ('train', 'dev', 'test')


def canonical_split(name: str) -> str:
  """Returns the name of a split, where `dev` has several."""
  return 'dev' if name in ('validation', 'valid', 'val') else name


def _is_article(fields):
  """Returns whether a row is an article with paragraphs and their questions (SQuAD)."""
  paragraphs = fields.get('paragraphs')
  is_list = types.is_of(paragraphs, list[dict]) and paragraphs
  return bool(is_list and 'qas' in paragraphs[0])


def _questions_of(fields):
  """Yields the columns of each question of a row."""
  if not _is_article(fields):
    yield fields
    return
  for paragraph in fields['paragraphs']:
    shared = {'context': paragraph.get('context'), 'title': fields.get('title')}
    for question in paragraph.get('qas') or ():
      yield {**shared, **question}


def _first_option(path: pathlib.Path) -> int:
  """Returns the number of the first option in MedMCQA's column `cop`: 0 or 1.

  The authors' files count from 1. The Parquet files of the hub count from 0, and have -1 where the
  answer is secret. A 0 or a 4 in the column decides.
  """
  numbers = set()
  for row in row_files.read(path, ('cop',)):
    if cells.is_null(row.fields.get('cop')):
      continue
    with row_files.explain(path, row.number):
      number = _option_number(row.fields)
    numbers.add(number)
  if 0 in numbers and 4 in numbers:
    raise types.UserError(f"{path}: column 'cop' has 0 and 4: number the options from 0 or from 1")
  if 4 in numbers:
    return 1
  if numbers & {-1, 0}:
    return 0
  first = int(not path.name.endswith('.parquet'))
  row_files.log_once(
      f"{path}: column 'cop' is read as the number of the right option from {first}, as in the "
      f'published {"files of the hub" if not first else "files of the authors"}'
  )
  return first


def _whole(value):
  """Returns a whole number that may be written as a text, or None."""
  if isinstance(value, str):
    value = int(value) if value.strip().isdecimal() else None
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  return int(value) if is_number and float(value).is_integer() else None


def _option_number(fields):
  number = fields.get('cop')
  try:
    whole = int(number)
    is_number = float(number) == whole and not isinstance(number, bool)
  except (TypeError, ValueError):
    is_number = False
  if not is_number or not -1 <= whole <= 5:
    raise ValueError(f"column 'cop' is {shown(number)}: the number of an option is needed")
  return whole


class SetReader:
  """Reads the rows of one file."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._first_option: int | None = None  # None: it is not known yet
    self._first_numbers: dict[str, int | None] = {}  # by column, of options in columns
    self._are_labels_truths: bool | None = None  # None: it is not known yet

  def is_question(self, row: FileRow) -> bool:
    """Returns whether a row has a question, and is no passage of a corpus."""
    names = (*_QUESTIONS, 'prompt', 'messages', 'reward_model', 'reward_spec')
    has_question = any(not cells.is_null(row.fields.get(name)) for name in names)
    return has_question or _is_article(row.fields)

  def read(self, row: FileRow) -> Iterator[Question]:
    """Yields the questions of a row: one, or those of an article of SQuAD.

    UserError: it cannot be read, with the name of a column.
    """
    with row_files.explain(self._path, row.number):
      for fields in _questions_of(row.fields):
        yield self._question(row, fields)

  def _question(self, row, row_fields):
    row_fields = _renamed(row_fields)
    fields = _flat(row_fields)
    passages, gold = _passages(fields)
    question = _question(fields)
    try:
      _check_is_text(fields)
      options, letter, answers = self._answer(fields)
    except Unanswerable as error:
      return Question(None, passages, str(error))
    steps = _steps(fields)
    hops = len(steps) or len(_supporting_titles(fields))
    is_verl = not cells.is_null(row_fields.get('reward_model'))
    if is_verl:  # its questions belong to a corpus of their own
      hops = 0
      gold = []
      steps = ()
    group_is_split = canonical_split(row.group) in SPLITS
    group_split = row.group if group_is_split else ''
    dataset = '' if group_is_split else row.group
    task = types.Task(
        id=self._id(row, fields),
        question=question,
        answers=answers,
        dataset=_name(fields, ('data_source', 'dataset')) or dataset or 'unnamed',
        split=_name(fields, ('split',)) or group_split,
        hops=hops,
        gold=tuple(dict.fromkeys(gold)),
        options=options,
        letter=letter,
        steps=steps,
    )
    has_id = not is_verl and _first(fields, _IDS)[0] != ''
    return Question(task, passages, has_id=has_id)

  def _id(self, row, fields):
    if not cells.is_null(fields.get('reward_model')):  # verl's rows have an index, and no id
      index = fields.get('index')
      if cells.is_null(index):
        index = row.number - 1
      dataset = _name(fields, ('data_source', 'dataset')) or 'unnamed'
      return f'{dataset}-{_name(fields, ("split",))}-{index}'
    for name in _IDS:
      value = fields.get(name)
      if cells.is_null(value) or value == '':
        continue
      if isinstance(value, float) and value.is_integer():  # pandas, where a row has none
        value = int(value)
      if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f'column {name!r} is {shown(value)}: a text or a whole number is needed')
      return str(value)
    own = row.key or f'{self._path.name.partition(".")[0]}-{row.number}'
    return f'{row.group}-{own}' if row.group else own

  def _answer(self, fields):
    """Returns (options, right letter, answers) of a row. Raises Unanswerable."""
    if fields.get('answerable') is False or fields.get('is_impossible') is True:
      name = 'answerable' if fields.get('answerable') is False else 'is_impossible'
      raise Unanswerable(f'column {name!r} is {fields[name]!r}')
    options, name, columns = _options(fields)
    letter = self._letter(fields, options, name, columns) if options else ''
    if letter:
      return tuple(sorted(options.items())), letter, (options[letter],)
    _check_is_no_choice(fields)
    name, value = _first(fields, _ANSWERS)
    if name and self._is_wrong(fields):
      raise Unanswerable("column 'label' is 0, as of a wrong answer")
    if not name:
      names = [column for column in ('reward_model', *_ANSWERS) if column in fields]
      if names:
        raise Unanswerable(f'column {names[0]!r} is empty')
      raise Unanswerable(
          f'no answer in the columns {cells.listed(fields)}, where one of '
          f'{", ".join(_ANSWERS)} is read'
      )
    if isinstance(value, bool):
      return _choice(_TRUTHS, 'yes' if value else 'no')
    if _is_none(fields, name, value):
      raise Unanswerable(f'column {name!r} is {value!r}')
    answers = _answers(name, value)
    for alias in _texts('answer_aliases', fields.get('answer_aliases') or []):
      answers.append(alias)
    answers = [answer.strip() for answer in answers if answer.strip()]
    answers += filter(None, map(_bare_number, answers))
    if not answers:
      column = name if cells.is_null(fields.get('reward_model')) else 'reward_model'
      raise Unanswerable(f'column {column!r} has the answers {shown(value)}')
    unique = tuple(dict.fromkeys(answers))
    if name == 'final_decision':
      if unique[0].lower() not in _DECISIONS:
        raise ValueError(
            f"column 'final_decision' is {unique[0]!r}: one of yes, no, maybe is needed"
        )
      return _choice(_DECISIONS, unique[0].lower())
    return (), '', unique

  def _is_wrong(self, fields):
    """Returns whether a label says that the answer is wrong, as in WikiQA and MultiRC.

    In such a file some question has answers with the labels 0 and 1.
    """
    if _whole(fields.get('label')) != 0:
      return False
    if self._are_labels_truths is None:
      questions = {0: set(), 1: set()}
      for row in row_files.read(self._path, (*_QUESTIONS, 'label')):
        label = _whole(row.fields.get('label'))
        questions.setdefault(label, set()).add(_first(row.fields, _QUESTIONS)[1])
      self._are_labels_truths = bool(questions[0] & questions[1])
    return self._are_labels_truths

  def _by_number(self, name, number, options, columns):
    """Returns the letter of the option with a number, where each option has a column.

    Sets count from 0 (INCLUDE) or from 1 (KMMLU, Belebele). The numbers of the column decide. If it
    holds anything else, a number in it is the text of an option.
    """
    letters = sorted(options)
    if name not in self._first_numbers:
      numbers = set()
      most = 0
      for row in row_files.read(self._path, (name, *columns)):
        most = max(most, sum(not cells.is_null(row.fields.get(column)) for column in columns))
        if not cells.is_null(row.fields.get(name)):
          numbers.add(_whole(row.fields[name]))
      first = None
      if numbers <= set(range(most + 1)):
        first = 0 if 0 in numbers else 1
        if not numbers & {0, most}:
          raise _UnclearNumber(
              f'column {name!r} is {number}, and no row tells whether options count from 0 or '
              'from 1: write letters'
          )
      self._first_numbers[name] = first
    first = self._first_numbers[name]
    if first is None:
      return next((letter for letter in letters if options[letter] == str(number)), None)
    if not 0 <= number - first < len(letters):
      raise ValueError(f'column {name!r} is {number}: there are {len(letters)} options')
    return letters[number - first]

  def _letter(self, fields, options, options_name, columns):
    """Returns the letter of the right option; None: the columns are no options after all."""
    if not cells.is_null(fields.get('cop')):
      if self._first_option is None:  # a second pass over the file, a table of short rows
        self._first_option = _first_option(self._path)
      number = _option_number(fields)
      if number < 0:
        raise Unanswerable(f"column 'cop' is {number}")
      letters = sorted(options)
      position = number - self._first_option
      if not 0 <= position < len(letters):
        raise ValueError(f"column 'cop' is {number}: there are {len(letters)} options")
      return letters[position]
    named: dict[str, str] = {}  # letters by the column that names them
    unclear = None
    for name in (*_LETTERS, *_ANSWERS, *_OTHER_LETTERS):
      if named and name in _OTHER_LETTERS:
        break
      value = fields.get(name)
      if isinstance(value, str):
        value = cells.parsed(value)
      if isinstance(value, list) and len(value) == 1:
        value = value[0]
      if cells.is_null(value) or value == '' or value == []:
        continue
      number = _whole(value) if columns else None
      if number is None:
        letter = _option(value, options)
      else:
        try:
          letter = self._by_number(name, number, options, columns)
        except _UnclearNumber as error:
          unclear = unclear or error
          continue
      if letter is None and name in _LETTERS:
        raise ValueError(
            f'column {name!r} is {shown(value)}: the letter or number of one of '
            f'{cells.listed(sorted(options))} is needed'
        )
      if letter is not None:
        named[name] = letter
    if len(set(named.values())) > 1:
      first, second = list(named)[:2]
      raise ValueError(
          f'columns {first!r} and {second!r} name different options, {named[first]} and '
          f'{named[second]}: correct one of them'
      )
    if not named:
      if unclear:
        raise unclear
      name, value = _first(fields, (*_LETTERS, *_ANSWERS))
      if not name:
        raise Unanswerable(f'column {options_name!r} has no right option')
      if isinstance(value, str) and len(value) > 1 and set(value) <= options.keys():
        raise Unanswerable(f'column {name!r} is {value!r}, which are several options')
      if columns and not re.fullmatch('[A-Za-z]', str(value).strip()):
        return None
      raise ValueError(
          f'column {name!r} is {shown(value)}: none of the {len(options)} {options_name} of the row'
      )
    return next(iter(named.values()))


def _renamed(fields):
  """Returns the columns of a row under the names that are read here."""
  fields = dict(fields)
  if cells.is_null(fields.get('reward_model')) and not cells.is_null(fields.get('reward_spec')):
    fields['reward_model'] = fields['reward_spec']  # SkyRL
  question = fields.get('question')
  if isinstance(question, dict) and 'stem' in question:  # ARC and others of their authors
    fields |= {'question': question['stem'], 'choices': question.get('choices')}
  return fields


def _flat(fields):
  """Returns the columns of a row with those of its nested columns.

  Those are verl's `reward_model` and `extra_info`, and FlashRAG's `metadata`. A column of the row
  itself comes first.
  """
  nested: dict[str, Any] = {}
  is_verl = not cells.is_null(fields.get('reward_model'))
  for name in ('extra_info', 'metadata'):
    value = fields.get(name)
    if isinstance(value, str):
      value = cells.parsed(value)
    if isinstance(value, dict):
      inner = value.get('metadata')
      if isinstance(inner, dict):  # FlashRAG's MuSiQue
        nested |= {column: item for column, item in inner.items() if not cells.is_null(item)}
      nested |= {column: item for column, item in value.items() if not cells.is_null(item)}
  if is_verl:
    reward = fields['reward_model']
    if isinstance(reward, str):
      reward = cells.parsed(reward)
    if isinstance(reward, dict) and not cells.is_null(reward.get('ground_truth')):
      nested['ground_truth'] = reward['ground_truth']
    elif cells.is_null(nested.get('ground_truth')):
      raise ValueError(
          f"column 'reward_model' is {shown(reward)}: a 'ground_truth' in it is needed"
      )
  present = {name: value for name, value in fields.items() if not cells.is_null(value)}
  known = {name: value for name, value in nested.items() if name in COLUMNS or name == 'index'}
  flat = dict.fromkeys(fields) | known | present
  if is_verl:
    # verl scores by this one. Other answers of the row, as in extra_info, hold a whole solution.
    for name in ('golden_answers', 'possible_answers', 'answers', 'answer', 'Answer'):
      flat.pop(name, None)
    flat['ground_truth'] = known['ground_truth']
  return flat


def _first(fields, names):
  """Returns (name, value) of the first column with a value; ('', None) without one."""
  for name in names:
    value = fields.get(name)
    if not cells.is_null(value):
      return name, value
  return '', None


def _name(fields, names):
  """Returns the first of these columns with a text, or ''."""
  for name in names:
    value = fields.get(name)
    if cells.is_null(value):
      continue
    if not isinstance(value, str):
      raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
    if value.strip():
      return value.strip()
  return ''


def _check_is_no_choice(fields):
  """Raises ValueError for options in the column `answers`, as in ReClor and QuAIL."""
  answers = fields.get('answers')
  for name in ('label', 'correct_answer_id'):
    number = _whole(fields.get(name))
    if isinstance(answers, list) and number in range(len(answers)) and len(answers) > 1:
      raise ValueError(
          f"column 'answers' has {len(answers)} texts, and column {name!r} is {number}: rename "
          f"'answers' to 'options' if only one of them is right, or else leave out {name!r}"
      )


def is_other_set(fields: Mapping[str, Any]) -> bool:
  """Returns whether a row with `answers` is one of a published set, and not of our own files."""
  has_query = cells.is_null(fields.get('question')) and not cells.is_null(fields.get('query'))
  try:
    if has_query or _passages(fields)[0]:
      return True
  except ValueError:  # the column means something else
    pass
  try:
    _check_is_no_choice(fields)
  except ValueError:
    return True
  return False


def _is_none(fields, name, value):
  """Returns whether a text says that there is no answer."""
  if value == ['No Answer Present.']:  # MS MARCO
    return True
  if name == 'Final answer':  # GAIA's test set
    return value == '?'
  return 'question_type' in fields and value in ('proof', 'notfound')  # NuminaMath 1.5


def _bare_number(text):
  """Returns the number of '42.0', '042' and '9 (apples)' as '42', '42' and '9', or None."""
  found = re.fullmatch(r'(-?)0*([0-9][0-9,]*)(\.[0-9]+)?( \([^()]+\))?', text)
  if not found:
    return None
  sign, whole, fraction, _ = found.groups('')
  number = sign + whole + (fraction if fraction.strip('.0') else '')
  return number if number != text else None


def _check_is_text(fields):
  """Raises Unanswerable for a question about an image or a file."""
  is_gaia = 'Final answer' in fields  # elsewhere the column says where a row comes from
  for name in (*_IMAGES, 'file_name'):
    is_about = name != 'file_name' or is_gaia
    if is_about and not cells.is_null(fields.get(name)) and fields[name]:
      kind = 'names a file' if name == 'file_name' else 'holds an image'
      raise Unanswerable(f'column {name!r} {kind}, and only text is read')


def _question(fields):
  """Returns the question: a column, or the end of a prompt."""
  name, value = _first(fields, _QUESTIONS)
  if name:
    if not isinstance(value, str):
      raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
    if not value.strip():
      raise ValueError(f'column {name!r} is empty: a text is needed')
    text = _readable(name, value.strip())
    _, before = _first(fields, _BEFORE)
    if isinstance(before, str) and before.strip() and text not in before:
      text = f'{before.strip()}\n{text}'
    return text
  name, value = _first(fields, ('prompt', 'messages'))
  if not name and 'prompt' not in fields:
    raise ValueError(
        f'no question in the columns {cells.listed(fields)}: one of {", ".join(_QUESTIONS)} or '
        'prompt is needed'
    )
  return _readable(name, question_of_prompt(value, name or 'prompt'))


def _readable(name, question):
  """Returns a question. ValueError: it is encrypted, as BrowseComp's are."""
  kinds = (str.isupper, str.islower, str.isdigit)
  is_code = question.isascii() and len(question) % 4 == 0 and len(question) >= _SHORTEST_CODE
  if is_code and all(any(map(kind, question)) for kind in kinds):
    try:
      base64.b64decode(question, validate=True).decode('utf-8')
    except binascii.Error:
      return question
    except UnicodeDecodeError:
      raise ValueError(
          f'column {name!r} is encrypted ({shown(question)}): decrypt questions and answers as '
          'their authors do, and write the texts'
      ) from None
  return question


def question_of_prompt(prompt: Any, column: str = 'prompt') -> str:
  """Returns the question of a prompt: the text after its last line 'Question:'.

  Without such a line it is the text after the first 'Question:', because a question may hold the
  word itself, or else the whole prompt. The prompt is a text, or a list of messages.
  """
  messages = cells.parsed(prompt) if isinstance(prompt, str) else prompt
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  contents: list[Any] = []
  if types.is_of(messages, list[dict]):
    contents = [m.get('content') for m in messages if m.get('role') == 'user']
  question = _content(contents[-1]) if contents else None
  if question is None:
    raise ValueError(f'column {column!r} is {shown(prompt)}: a text of role "user" is needed')
  lines = list(re.finditer(r'^Question:', question, re.MULTILINE))
  if lines:
    question = question[lines[-1].end() :]
  elif 'Question:' in question:
    question = question.partition('Question:')[2]
  question = question.strip()
  if not question:
    raise ValueError(f'column {column!r} has no question: a message of role "user" is needed')
  return question


def _content(content):
  """Returns the text of a message, or of its parts; None: it has none."""
  if isinstance(content, list) and types.is_of(content, list[dict]):
    kinds = {part.get('type') for part in content}
    if kinds <= {'text'}:
      return ''.join(part.get('text') or '' for part in content)
    raise ValueError(f"column 'prompt' holds {', '.join(map(str, kinds))}, and only text is read")
  return content if isinstance(content, str) else None


def _answers(name, value):
  """Returns the answers in a column, in its order."""
  if isinstance(value, str):
    value = _of_text(name, value)
  if isinstance(value, dict):
    value = _of_dict(name, value)
  return _texts(name, value)


def _of_text(name, text):
  """Returns what a text holds: itself, a list of answers in JSON, or the end of a solution."""
  solution = re.search(r'####[ \t]*(\S[^\n]*?)\s*\Z', text)
  if solution:  # GSM8K
    return solution[1].replace(',', '')
  try:
    value = cells.parsed(text)
  except ValueError as error:
    raise ValueError(f'column {name!r}: {error}') from error
  if isinstance(value, dict):
    return value
  if isinstance(value, list):
    # A ground truth may be for a user's own reward, which parses the text.
    holds_objects = name != 'ground_truth' and any(isinstance(item, dict) for item in value)
    if name == 'possible_answers' or holds_objects or types.is_of(value, list[str]):
      return value
  return text  # such as the interval [1, 2]


_DICT_KEYS = ('target', 'value', 'Value', 'text', 'answer', 'answers', 'golden_answers')
_ALIASES = ('aliases', 'Aliases')
_NORMALIZED = ('normalized_aliases', 'NormalizedAliases', 'normalized_value', 'NormalizedValue')


def _of_dict(name, value):
  """Returns the answers in a dict: those of Search-R1, TriviaQA and SQuAD."""
  answers = []
  keys = [key for key in (*_DICT_KEYS, *_ALIASES) if not cells.is_null(value.get(key))]
  others = cells.without_nulls(value).keys() - {*_DICT_KEYS, *_ALIASES, *_NORMALIZED}
  if name == 'ground_truth' and _whole(value.get('target')) is not None and others:  # Countdown
    raise ValueError(
        f'column {name!r} has the keys {cells.listed(sorted(value))}: a number as target beside '
        'other keys is no answer. For a reward of your own, write the dict as a JSON text'
    )
  for key in keys or [key for key in _NORMALIZED if value.get(key)]:
    answers += _texts(f'{name}.{key}', value[key])
  if not keys and not answers and not any(key in value for key in (*_DICT_KEYS, *_ALIASES)):
    raise ValueError(
        f'column {name!r} has the keys {cells.listed(value) or "of an empty dict"}: one of '
        f'{", ".join(_DICT_KEYS)} is needed'
    )
  return answers


def _texts(name, value):
  """Returns a value as a list of texts. Numbers are written as texts."""
  if isinstance(value, str) and name == 'answer_aliases':
    value = cells.parsed(value)
  values = value if isinstance(value, list) else [value]
  texts = []
  for item in values:
    if cells.is_null(item):
      continue
    if isinstance(item, dict) and isinstance(item.get('text'), str):  # SQuAD's own files
      item = item['text']
    if isinstance(item, list) and len(values) == 1:  # a list in a list
      return _texts(name, item)
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    if is_number:
      item = str(int(item)) if float(item).is_integer() else str(item)
    if not isinstance(item, str):
      raise ValueError(f'column {name!r} is {shown(value)}: a text, a number or a list is needed')
    texts.append(item)
  return texts


def _choice(texts, right):
  """Returns (options, right letter, answers) of a choice between texts."""
  letter = _LETTER[texts.index(right)]
  return tuple(zip(_LETTER, texts)), letter, (right,)


def _options(fields):
  """Returns ({letter: text}, the name of the column, the columns if each option has one).

  Without a choice, the dict is empty.
  """
  name, value = _first(fields, _OPTIONS)
  if not name:
    for family in _OPTION_COLUMNS:
      columns = [column for column in family if not cells.is_null(fields.get(column))]
      if columns[:2] == list(family[:2]):
        texts = [_option_text(column, fields[column]) for column in columns]
        return dict(zip(_LETTER, texts)), f'options {columns[0]}, {columns[1]}, ..', family
    return {}, '', ()
  if isinstance(value, str):
    value = cells.parsed(value)
  if isinstance(value, dict) and isinstance(value.get('text'), list):  # ARC
    labels = value.get('label') or list(_LETTER[: len(value['text'])])
    value = dict(zip(labels, value['text'], strict=True))
  if isinstance(value, list) and types.is_of(value, list[dict]) and value:
    pairs = [(item.get('key', item.get('label')), item) for item in value]
    value = {key: item.get('value', item.get('text')) for key, item in pairs}
  if isinstance(value, list):
    if len(value) > len(_LETTER):
      raise ValueError(f'column {name!r} has {len(value)} options: at most 26 are read')
    value = dict(zip(_LETTER, value))
  if not isinstance(value, dict):
    raise ValueError(f'column {name!r} is {shown(value)}: a dict or a list of texts is needed')
  present = {key: text for key, text in value.items() if not cells.is_null(text)}
  return {str(key): _option_text(name, text) for key, text in present.items()}, name, ()


def _option_text(name, value):
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str):
    raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
  return value.strip()


def _option(value, options):
  """Returns the letter of the option that a value names, or None."""
  letters = sorted(options)
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    if str(value) in options:
      return str(value)
    position = int(value)
    is_position = position == value and 0 <= position < len(letters)
    return letters[position] if is_position else None
  if not isinstance(value, str):
    return None
  text = value.strip()
  bare = text.strip('(). ')  # 'B' for '(B)' and 'B.'
  for letter in letters:
    if letter.lower() == bare.lower():
      return letter
  if re.fullmatch('op[a-e]', text.lower()):  # MedMCQA
    position = 'abcde'.index(text.lower()[-1])
    return letters[position] if position < len(letters) else None
  by_text = [letter for letter in letters if options[letter] == text]
  if by_text:
    return by_text[0]
  if text.isdecimal():
    return _option(int(text), options)
  return None


def _steps(fields):
  """Returns (sub-question, answer) pairs of MuSiQue."""
  value = fields.get('question_decomposition')
  if isinstance(value, str):
    value = cells.parsed(value)
  if not types.is_of(value, list[dict]):
    return ()
  steps = []
  for step in value:
    if isinstance(step.get('question'), str) and isinstance(step.get('answer'), str):
      steps.append((step['question'], step['answer']))
  return tuple(steps)


def _passages(fields):
  """Returns (passages of a row, ids of those that hold the answer)."""
  name, value = _first(fields, _PASSAGES)
  if not value:
    return [], []
  if isinstance(value, str) and name not in ('paragraphs', 'CONTEXTS'):
    parsed = cells.parsed(value)
    if isinstance(parsed, str):  # SQuAD, BoolQ
      title = fields.get('title')
      texts = [(title if isinstance(title, str) else '', parsed, True)]
    else:
      texts = _paragraphs(name, parsed, fields)
  else:
    if isinstance(value, str):
      value = cells.parsed(value)
    texts = _paragraphs(name, value, fields)
  passages = []
  gold = []
  for title, text, is_gold in texts:
    if not text.strip():
      continue
    passage = make_passage(title, text)
    passages.append(passage)
    if is_gold:
      gold.append(passage.id)
  return passages, gold


def make_passage(title: str, text: str) -> types.Passage:
  """Returns a passage of a question. Equal passages of several questions have one id."""
  title = title.strip()
  text = text.strip()
  digest = hashlib.sha256(f'{title}\n{text}'.encode('utf-8', 'replace')).hexdigest()
  return types.Passage(f'p{digest[:16]}', title, text)


def _paragraphs(name, value, fields):
  """Returns (title, text, whether it holds the answer) of each paragraph of a row."""
  supporting = _supporting_titles(fields)
  if isinstance(value, dict) and isinstance(value.get('contexts'), list):  # PubMedQA
    value = value['contexts']
  if isinstance(value, dict):  # columns, as the hub writes HotpotQA and 2WikiMultiHopQA
    titles = value.get('title')
    texts = next((value[key] for key in ('sentences', 'content') if key in value), None)
    if not isinstance(titles, list) or not isinstance(texts, list) or len(titles) != len(texts):
      raise ValueError(
          f'column {name!r} is {shown(value)}: lists of titles and of sentences are needed'
      )
    value = list(map(list, zip(titles, texts)))
  if not isinstance(value, list):
    raise ValueError(f'column {name!r} is {shown(value)}: a list of paragraphs is needed')
  paragraphs = []
  for item in value:
    title: Any = None
    text: Any = None
    is_supporting = None
    if isinstance(item, str):
      title = ''
      text = item
      is_supporting = True
    elif isinstance(item, dict):
      title = item.get('title') or ''
      text = next((item[key] for key in _TEXT_KEYS if not cells.is_null(item.get(key))), None)
      is_supporting = item.get('is_supporting')
    elif isinstance(item, list) and len(item) == 2:
      title, text = item
    if types.is_of(text, list[str]):
      text = ' '.join(sentence.strip() for sentence in text)
    if not isinstance(title, str) or not isinstance(text, str):
      raise ValueError(f'column {name!r} has {shown(item)}: a title and its text are needed')
    if is_supporting is None:
      is_supporting = title in supporting
    paragraphs.append((title, text, bool(is_supporting)))
  return paragraphs


_TEXT_KEYS = ('paragraph_text', 'sentences', 'text', 'content', 'context')


def _supporting_titles(fields):
  """Returns the titles of the paragraphs that hold the answer (HotpotQA, 2WikiMultiHopQA)."""
  value = fields.get('supporting_facts')
  if isinstance(value, str):
    value = cells.parsed(value)
  if isinstance(value, dict):
    value = value.get('title')
  titles = set()
  for item in value if isinstance(value, list) else ():
    title = item[0] if isinstance(item, list) and item else item
    if isinstance(title, dict):
      title = title.get('title')
    if isinstance(title, str):
      titles.add(title)
  return titles
