"""Question sets as they are published: the columns of a row in, Tasks and Passages out.

`layouts.LAYOUTS` has a record for each layout, and `layout_fit` finds the one that a file has, or
takes the user's own (data.columns). A row without an answer, such as one of a test set, is read for
its passages alone.
"""

import base64
import binascii
from collections.abc import Iterator
from collections.abc import Mapping
import functools
import hashlib
import pathlib
import re
from typing import Any
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.data import cells
from stppo_jax.data import layout_fit
from stppo_jax.data import layout_profile as profile_lib
from stppo_jax.data import layout_values as values_lib
from stppo_jax.data import layouts
from stppo_jax.data import row_files
from stppo_jax.data.layout_values import get
from stppo_jax.data.layout_values import LETTERS
from stppo_jax.data.layout_values import Unanswerable
from stppo_jax.data.row_files import FileRow
from stppo_jax.types import shown

_SHORTEST_CODE = 40  # characters of an encrypted question
SPLITS = ('train', 'dev', 'test')


class Question(NamedTuple):
  """What a row holds."""

  task: types.Task | None  # None: there is no answer
  passages: list[types.Passage]  # those that come with the question
  reason: str = ''  # why there is no task
  has_id: bool = False  # whether the file names the row


def canonical_split(name: str) -> str:
  """Returns the name of a split, where `dev` has several."""
  return 'dev' if name in ('validation', 'valid', 'val') else name


def is_question(fields: Mapping[str, object], columns: Mapping[str, Any]) -> bool:
  """Returns whether a row has a question, and is no passage of a corpus."""
  names = (columns['question'],) if columns else profile_lib.QUESTIONS
  return any(get(fields, name) is not None for name in names) or profile_lib.is_article(fields)


def known_columns(columns: Mapping[str, object]) -> tuple[str, ...]:
  """Returns the columns of a table that may be read for a question or its passages."""
  records = layout_fit.user_layouts(columns) if columns else layouts.LAYOUTS
  names = [name for layout in records for name in profile_lib.names_of(layout)]
  names += [*profile_lib.IDS, *profile_lib.SPLITS, *profile_lib.DATASETS, *profile_lib.PASSAGES]
  names += [*profile_lib.FACTS, *profile_lib.STEPS, *profile_lib.IMAGES, *values_lib.STATES]
  names += [values_lib.ALIASES, 'title', 'index', 'file_name']
  return tuple(dict.fromkeys([*names, *(name.partition('.')[0] for name in names)]))


class SetReader:
  """Reads the questions of one file. `columns` are those of data.columns, or {}."""

  def __init__(self, path: pathlib.Path, columns: Mapping[str, object]):
    self._path = path
    self.reading = layout_fit.understand(path, columns)
    self._layout = self.reading.layout

  @property
  def is_own(self) -> bool:
    """Whether the file is one of our own."""
    return self._layout is layout_fit.OWN

  def unusable(self, fields: Mapping[str, object]) -> str:
    """Returns why a row of one of our own files is left out, or ''."""
    try:
      _check_is_text(fields)
      values_lib.check_state(fields)
    except Unanswerable as error:
      return str(error)
    return ''

  def read(self, row: FileRow) -> Iterator[Question]:
    """Yields the questions of a row: one, or those of an article of SQuAD.

    UserError: it cannot be read, with the name of a column.
    """
    with row_files.explain(self._path, row.number):
      for fields in profile_lib.questions_of(row.fields):
        yield self._question(row, fields)

  def _question(self, row, fields):
    layout = self._layout
    passages, gold = _passages(fields, layout)
    question = self._question_text(fields)
    try:
      _check_is_text(fields)
      values_lib.check_state(fields)
      options, letter, answers = self._answer(fields)
    except Unanswerable as error:
      return Question(None, passages, str(error))
    steps = _steps(fields)
    hops = len(steps) or len(_supporting_titles(fields))
    if layout.is_indexed:  # its questions belong to a corpus of their own
      hops = 0
      gold = []
      steps = ()
    group_is_split = canonical_split(row.group) in SPLITS
    group_split = row.group if group_is_split else ''
    dataset = '' if group_is_split else row.group
    split_columns = (layout.split,) if layout.split else profile_lib.SPLITS
    task = types.Task(
        id=self._id(row, fields),
        question=question,
        answers=answers,
        dataset=_name(fields, profile_lib.DATASETS) or dataset or 'unnamed',
        split=_name(fields, split_columns) or group_split,
        hops=hops,
        gold=tuple(dict.fromkeys(gold)),
        options=options,
        letter=letter,
        steps=steps,
    )
    has_id = not layout.is_indexed and bool(values_lib.first_of(fields, self._id_columns())[0])
    return Question(task, passages, has_id=has_id)

  def _question_text(self, fields):
    """Returns the question: a column, or a prompt without its instruction."""
    layout = self._layout
    name = layout.question
    value = values_lib.value_of(get(fields, name))
    is_prompt = name in ('prompt', 'messages') and layout.source != layouts.USER
    if is_prompt or types.is_of(value, list[dict]):
      return _readable(name, self._prompts.question(get(fields, name)))
    value = get(fields, name)
    if not isinstance(value, str):
      raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
    if not value.strip():
      raise ValueError(f'column {name!r} is empty: a text is needed')
    text = _readable(name, value.strip())
    before = get(fields, layout.before) if layout.before else None
    is_users = layout.source == layouts.USER
    if is_users and not values_lib.is_empty(before) and not isinstance(before, str):
      raise ValueError(f'column {layout.before!r} is {shown(before)}: a text is needed')
    if isinstance(before, str) and before.strip():
      before = before.strip()
      if re.search(rf'(?<!\w){re.escape(text)}\Z', before):
        text = before
      elif before not in text:
        text = f'{before}\n{text}'
    return text

  @functools.cached_property
  def _prompts(self):
    return PromptReader(self._path, self._layout.question)

  def _id_columns(self):
    return (self._layout.id,) if self._layout.id else profile_lib.IDS

  def _id(self, row, fields):
    if self._layout.is_indexed:  # verl's rows have an index, and no id
      _, index = values_lib.first_of(fields, ('index', 'extra_info.index'))
      if index is None:
        index = row.number - 1
      dataset = _name(fields, profile_lib.DATASETS) or 'unnamed'
      return f'{dataset}-{_name(fields, profile_lib.SPLITS)}-{index}'
    name, value = values_lib.first_of(fields, self._id_columns())
    if not name:
      own = row.key or f'{self._path.name.partition(".")[0]}-{row.number}'
      return f'{row.group}-{own}' if row.group else own
    if isinstance(value, float) and value.is_integer():  # pandas, where a row has none
      value = int(value)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
      raise ValueError(f'column {name!r} is {shown(value)}: a text or a whole number is needed')
    return str(value)

  def _answer(self, fields):
    """Returns (options, right letter, answers) of a row. Raises Unanswerable."""
    layout = self._layout
    if not layout.answers:
      raise Unanswerable(f'no answer in the columns {cells.listed(fields)}')
    if layout.flag and not cells.flag(layout.flag, get(fields, layout.flag)):
      raise Unanswerable(f'column {layout.flag!r} is 0, as of a wrong answer')
    if self.reading.options:
      return self._choice(fields)
    answers = values_lib.texts_of(layout, fields)
    kinds = layout.answers.values()
    if layouts.TRUTH in kinds:
      return _choice_of(values_lib.TRUTHS, answers[0])
    if layouts.DECISION in kinds:
      return _choice_of(values_lib.DECISIONS, answers[0])
    return (), '', answers

  def _choice(self, fields):
    """Returns (options, right letter, its text) of a row. Raises Unanswerable."""
    choice = values_lib.choice_of(self._layout, fields, self.reading.options)
    answers = self._layout.answers
    names = [name for name in answers if not values_lib.is_empty(get(fields, name))]
    if choice is None or not names:
      raise Unanswerable(f'column {next(iter(answers))!r} is empty')
    reason = ''
    for name in names:
      value = values_lib.named(name, get(fields, name), choice)
      kind = self.reading.kinds.get(name, '')
      letter = values_lib.letter_of(kind, value, choice) if kind else None
      if letter:
        return tuple(sorted(choice.texts.items())), letter, (choice.texts[letter],)
      reason = reason or f'column {name!r} is {shown(value)}, which is no single option'
    raise Unanswerable(reason)


def _choice_of(texts, right):
  """Returns (options, right letter, answers) of a choice between texts."""
  return tuple(zip(LETTERS, texts)), LETTERS[texts.index(right)], (right,)


def _name(fields, names):
  """Returns the first of these columns with a text, or ''."""
  name, value = values_lib.first_of(fields, names)
  if not name:
    return ''
  if not isinstance(value, str):
    raise ValueError(f'column {name!r} is {shown(value)}: a text is needed')
  return value.strip()


def _check_is_text(fields):
  """Raises Unanswerable for a question about an image or a file."""
  is_gaia = 'Final answer' in fields  # elsewhere the column says where a row comes from
  for name in (*profile_lib.IMAGES, 'file_name'):
    is_about = name != 'file_name' or is_gaia
    if is_about and not values_lib.is_empty(get(fields, name)):
      kind = 'names a file' if name == 'file_name' else 'holds an image'
      raise Unanswerable(f'column {name!r} {kind}, and only text is read')


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


class _Prompt(NamedTuple):
  """A prompt of a row."""

  before: tuple[tuple[str, str], ...]  # (role, text) of the messages before the last of the user
  text: str  # the last message of the user


class PromptReader:
  """Reads questions in the prompts of one file.

  Messages before the question, and a text before its word 'Question:', are an instruction if all
  rows of the file have the same ones, and at least two rows tell. An instruction is left out, and
  the log shows it. All other texts belong to the question.
  """

  def __init__(self, path: pathlib.Path, column: str):
    self._column = column
    num_prompts = 0
    first: _Prompt | None = None
    starts: set[str] = set()  # the texts before a word 'Question:' in all rows
    are_same = True
    for _, fields in profile_lib.rows(path, (column.partition('.')[0],)):
      try:
        prompt = _prompt(get(fields, column), column)
      except ValueError:
        continue  # the reader of the row complains
      num_prompts += 1
      starts = starts & _starts(prompt.text) if first else _starts(prompt.text)
      first = first or prompt
      are_same = are_same and prompt.before == first.before
    is_told = num_prompts > 1
    self._start = max(starts, key=len, default='') if is_told else ''
    self._before = first.before if first and is_told and are_same else ()
    texts = [*(text for _, text in self._before), self._start]
    if any(map(str.strip, texts)):
      row_files.log_once(
          f'{path}: all prompts in {column!r} begin with an instruction, which is left out of the '
          f'questions: {shown(" ".join(filter(None, texts)))}'
      )

  def question(self, value: object) -> str:
    """Returns the question of a prompt. ValueError: it has none, or several turns."""
    column = self._column
    prompt = _prompt(value, column)
    texts = []
    if prompt.before != self._before:
      roles = {role for role, _ in prompt.before}
      if not roles <= {'system', 'developer'}:
        raise ValueError(
            f'column {column!r} has a conversation before its last message, and a question is one '
            "text: write a column 'question' that holds all of it"
        )
      texts = [text.strip() for _, text in prompt.before]
    question = prompt.text.removeprefix(self._start).strip().removeprefix('Question:').strip()
    if not question:
      raise ValueError(f'column {column!r} has no question: a message of role "user" is needed')
    return '\n\n'.join(filter(None, [*texts, question]))


def _starts(text):
  """Returns the texts before each word 'Question:' of a text."""
  return {text[: match.start()] for match in re.finditer('Question:', text)}


def _prompt(prompt: Any, column: str) -> _Prompt:
  """Returns a prompt that is a text or a list of messages. ValueError: the user writes nothing."""
  messages = cells.parsed(prompt) if isinstance(prompt, str) else prompt
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  texts: list[tuple[str, Any]] = []
  if types.is_of(messages, list[dict]):
    texts = [(str(message.get('role')), _content(message.get('content'))) for message in messages]
  last = max((i for i, (role, _) in enumerate(texts) if role == 'user'), default=None)
  if last is None or texts[last][1] is None:
    raise ValueError(f'column {column!r} is {shown(prompt)}: a text of role "user" is needed')
  before = tuple((role, text) for role, text in texts[:last] if text)
  return _Prompt(before, texts[last][1])


def _content(content):
  """Returns the text of a message, or of its parts; None: it has none."""
  if isinstance(content, list) and types.is_of(content, list[dict]):
    kinds = {part.get('type') for part in content}
    if kinds <= {'text'}:
      return ''.join(part.get('text') or '' for part in content)
    raise ValueError(f"column 'prompt' holds {', '.join(map(str, kinds))}, and only text is read")
  return content if isinstance(content, str) else None


def _steps(fields):
  """Returns (sub-question, answer) pairs of MuSiQue."""
  value = values_lib.value_of(values_lib.first_of(fields, profile_lib.STEPS)[1])
  if not types.is_of(value, list[dict]):
    return ()
  steps = []
  for step in value:
    if isinstance(step.get('question'), str) and isinstance(step.get('answer'), str):
      steps.append((step['question'], step['answer']))
  return tuple(steps)


def _passages(fields, layout):
  """Returns (passages of a row, ids of those that hold the answer)."""
  columns: tuple[str, ...] = profile_lib.PASSAGES
  if layout.source == layouts.USER:
    columns = (layout.passages,) if layout.passages else ()
  name, value = values_lib.first_of(fields, columns)
  if not name:
    return [], []
  parsed = values_lib.value_of(value)
  if isinstance(parsed, str):  # SQuAD, BoolQ
    title = fields.get('title')
    texts = [(title if isinstance(title, str) else '', parsed, True)]
  else:
    texts = _paragraphs(name, parsed, fields)
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
  value = values_lib.value_of(values_lib.first_of(fields, profile_lib.FACTS)[1])
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
