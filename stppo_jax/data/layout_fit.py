"""Which layout a file of questions has. All of its rows decide, and nothing is guessed.

A file fits a layout if it has the columns, if each value can be read, and if no other column could
name another answer or hold what the question is about. If no layout fits, or if two of them lead to
different answers, the error says how to name the columns.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import itertools
import pathlib
import re
from typing import Any
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.data import cells
from stppo_jax.data import layout_profile as profile_lib
from stppo_jax.data import layout_values as values_lib
from stppo_jax.data import layouts
from stppo_jax.data.layouts import SetLayout
from stppo_jax.types import shown

_MAX_TEMPLATES = 20  # prompts of one file may have those of several origins

OWN = SetLayout(
    'own file',
    'docs/data.md',
    'question',
    {'answers': 'text'},
    ignores=('answer', 'options', 'options.*', 'gold', 'steps', 'hops'),
)


class Reading(NamedTuple):
  """How the questions of a file are read."""

  layout: SetLayout
  kinds: Mapping[str, str]  # {column: how it names the answer, as in layouts.SetLayout.answers}
  options: tuple[str, ...]  # the columns with options
  has_answers: bool = True

  def described(self) -> str:
    """Returns what was understood, for people."""
    layout = self.layout
    parts = [f'question in {layout.question!r}']
    kinds = [f'{name!r} ({_MEANINGS[kind]})' for name, kind in self.kinds.items()]
    parts.append(f'answer in {", ".join(kinds) or "no column"}')
    if self.options:
      parts.append(f'options in {cells.listed(self.options)}')
    return f'{layout.name} ({layout.source}): {"; ".join(parts)}'


_MEANINGS = {
    'letter': 'the letter of an option',
    'index0': 'the number of an option, from 0',
    'index1': 'the number of an option, from 1',
    'text': 'a text',
    layouts.ANY: 'as the row tells',
    layouts.NUMBER: 'a whole number',
    layouts.BOXED: 'the last box of a solution',
    layouts.TRUTH: 'true or false',
    layouts.DECISION: 'yes, no or maybe',
}


class Misfit(Exception):
  """A file does not fit a layout.

  `number` is the row that shows it, `text` a column with texts that the question may need, and
  `columns` the value of data.columns to suggest.
  """

  def __init__(
      self, number: int, message: str, text: str = '', columns: Mapping[str, object] | None = None
  ):
    super().__init__(message)
    self.number = number
    self.text = text
    self.columns = columns


def user_layouts(columns: Mapping[str, Any]) -> tuple[SetLayout, ...]:
  """Returns the layouts that the setting data.columns may describe."""
  options = columns.get('options', '')
  kinds: tuple[str, ...] = (layouts.ANY,) if options else ('text', layouts.TRUTH)
  if 'answer_is' in columns:
    kinds = (columns['answer_is'],)
  return tuple(_user_layout(columns, kind) for kind in kinds)


def _user_layout(columns, kind):
  options = columns.get('options', '')
  answers = columns.get('answers', 'answer')
  names = [answers] if isinstance(answers, str) else answers
  return SetLayout(
      'your columns',
      layouts.USER,
      columns['question'],
      dict.fromkeys(names, kind),
      options=options if isinstance(options, str) else tuple(options),
      before=columns.get('context', ''),
      id=columns.get('id', ''),
      split=columns.get('split', ''),
      passages=columns.get('passages', ''),
  )


_understood: dict[tuple, Reading] = {}


def understand(path: pathlib.Path, columns: Mapping[str, object]) -> Reading:
  """Returns how the questions of a file are read. UserError: that is not certain.

  `columns` are those of the setting data.columns, or {}.
  """
  state = path.stat()
  key = (str(path), state.st_mtime_ns, state.st_size, repr(sorted(columns.items())))
  if key not in _understood:
    _understood[key] = _understand(path, columns)
  return _understood[key]


def _understand(path, columns):
  light = profile_lib.light_columns(path)
  profile = profile_lib.profile_of(path, light)
  records = user_layouts(columns) if columns else (OWN, *layouts.LAYOUTS)
  checks: list[_Check] = []
  misfits: list[tuple[int, Misfit]] = []  # with the number of the check's columns
  for layout in records:
    try:
      checks.append(_check_of(layout, profile, is_certain=bool(columns)))
    except Misfit as misfit:
      misfits.append((0, misfit))
  if not checks and not columns and not any(map(profile_lib.may_name_answer, profile.facts)):
    for question in filter(profile.facts.__contains__, profile_lib.QUESTIONS):
      layout = SetLayout('no answers', 'docs/data.md', question, {})
      return Reading(layout, {}, (), has_answers=False)
  for row, fields in profile_lib.rows(path, light):
    for check in list(checks):
      try:
        check.add(row.number, fields)
      except (Misfit, ValueError) as error:
        number = getattr(error, 'number', row.number)
        misfits.append((check.rank, Misfit(number, str(error))))
        checks.remove(check)
  readings = []
  for check in checks:
    try:
      reading = check.reading()
      check.check_texts()
      readings.append(reading)
    except Misfit as misfit:
      misfits.append((check.rank, misfit))
  readings = _most_certain(readings)
  meanings = {(r.layout.question, r.layout.before, r.options, *r.kinds.items()) for r in readings}
  if len(meanings) == 1:
    return readings[0]
  if readings:
    ways = ' or '.join(reading.described() for reading in readings[:2])
    misfits = [(0, Misfit(profile.first.number, f'may be {ways}'))]
  raise _refusal(profile, misfits, columns)


def _most_certain(readings):
  """Returns the readings of our own layout, or of single sets, or else those of families."""
  for group in (
      [reading for reading in readings if reading.layout is OWN],
      [reading for reading in readings if not reading.layout.is_family],
      readings,
  ):
    answered = [reading for reading in group if reading.has_answers]
    if group:
      return answered or group
  return []


class _UnreadText:
  """Whether the values of a column that is not read are texts that the questions need."""

  def __init__(self) -> None:
    self._num = 0  # values
    self._num_long = 0  # those that are longer than the question of their row
    self._first: object = None
    self._is_constant = True

  def add(self, value: object, question: object) -> None:
    """Looks at the value of a row."""
    if values_lib.is_empty(value):
      return
    self._num += 1
    self._num_long += profile_lib.may_hold_context(value, question)
    if self._num == 1:
      self._first = value
    self._is_constant = self._is_constant and value == self._first

  @property
  def may_be_needed(self) -> bool:
    """Whether most texts are long, and differ as an instruction or a canary would not."""
    is_same = self._is_constant and self._num > 1
    return self._num_long > 0 and 2 * self._num_long >= self._num and not is_same


class _UnreadPrompt:
  """Whether the prompts of a file say more than the questions of another column.

  A template around the question is the same text in all rows, or in those of the same origin.
  """

  def __init__(self) -> None:
    self._num = 0  # prompts with their question
    self._others: set[int] = set()  # hashes of what they say besides
    self._num_long = 0  # prompts that say more than the question

  def add(self, value: object, question: object) -> None:
    """Looks at the prompt of a row."""
    try:
      value = cells.parsed(value) if isinstance(value, str) else value
    except ValueError:
      return  # the text of an array
    texts = _message_texts(value)
    if not isinstance(question, str) or not question or question not in texts:
      return
    other = texts.replace(question, '')  # a template may say it twice
    self._num += 1
    self._others.add(hash(other))
    self._num_long += profile_lib.may_hold_context(other, question)

  @property
  def may_be_needed(self) -> bool:
    """Whether most prompts hold a long text, and these differ as templates would not."""
    differ = len(self._others) > _MAX_TEMPLATES or 2 * len(self._others) > self._num > 1
    return differ and 2 * self._num_long > self._num


def _message_texts(value):
  """Returns the texts of messages and their parts, in order."""
  if isinstance(value, dict):
    value = [value.get(name) for name in ('content', 'text')]
  if isinstance(value, list):
    return '\n'.join(filter(None, map(_message_texts, value)))
  return value if isinstance(value, str) else ''


class _Check:
  """Whether the rows of a file fit a layout. The layout of the user is certain."""

  def __init__(self, layout: SetLayout, profile: profile_lib.Profile, is_certain: bool):
    self.layout = layout
    is_usual = not {layouts.TRUTH, layouts.DECISION} & set(layout.answers.values())
    self.rank = 1 + is_usual * (
        1 + 2 * bool(layout.options) + len(layout.answers) - bool(layout.flag)
    )
    self.options = values_lib.option_columns(layout, profile.names)
    unread = [] if is_certain else _unread(layout, profile, self.options)
    self.unread = unread
    self.guests = [name for name in unread if profile_lib.may_name_answer(name)]
    self.guests = [name for name in self.guests if not profile.facts[name].is_prose]
    self.lists: list[tuple[str, ...]] = [
        (name,) for name in unread if profile.facts[name].num_lists
    ]
    self.lists += profile_lib.rows_of_columns(
        profile.names, [name for name in unread if not profile.facts[name].num_lists]
    )
    self.profile = profile
    self.differences: dict[str, tuple[int, str]] = {}  # by guest, the first row and a complaint
    self._texts: dict[str, _UnreadText] = {}
    # A file of our own with `gold` has its texts in the corpus.
    if layout is not OWN or 'gold' not in profile.facts:
      self._texts = {name: _UnreadText() for name in unread if self._may_be_needed(name)}
    self._prompt: _UnreadPrompt | None = None
    if 'prompt' in profile.facts and layout.question != 'prompt' and not is_certain:
      self._prompt = _UnreadPrompt()

  def _may_be_needed(self, name):
    facts = self.profile.facts[name]
    is_own_passage = self.layout is OWN and name in profile_lib.PASSAGES
    has_text = facts.num > facts.num_numbers + facts.num_ids
    return has_text and not is_own_passage and not profile_lib.explains_answer(name)

  def add(self, number: int, fields: Mapping[str, object]) -> None:
    """Looks at a row. Raises Misfit or ValueError."""
    for name in self.unread:
      value = values_lib.get(fields, name)
      is_answer = profile_lib.is_answer_name(name) and not isinstance(value, bool)
      if not is_answer and not profile_lib.is_share(name) and cells.marks_bad(name, value):
        raise Misfit(number, f'column {name!r} is {shown(value)}, and may mark a wrong answer')
    question = values_lib.get(fields, self.layout.question)
    for name, text in self._texts.items():
      text.add(values_lib.get(fields, name), question)
    if self._prompt is not None:
      self._prompt.add(values_lib.get(fields, 'prompt'), question)

  def check_texts(self) -> None:
    """Raises Misfit if the question may need a text that is not read."""
    for name, text in self._texts.items():
      if text.may_be_needed:
        raise Misfit(
            self.profile.first.number,
            f"column {name!r} is not read, and the question may need its text ('context' puts it "
            "before the question, and without 'context' it is ignored)",
            name,
        )
    if self._prompt is not None and self._prompt.may_be_needed:
      question = self.layout.question
      raise Misfit(
          self.profile.first.number,
          f"column 'prompt' says more than the question in {question!r}: say which of them is the "
          "'question'",
          columns={'question': 'prompt', 'answers': next(iter(self.layout.answers))},
      )

  def reading(self) -> Reading:
    """Returns how the file is read. Raises Misfit."""
    raise NotImplementedError


def _check_of(layout, profile, is_certain):
  """Returns the check of a layout. Raises Misfit if the names of the columns do not fit."""
  if layout is OWN:
    _check_own_names(profile)
    return _OwnCheck(layout, profile, is_certain)
  if layout.is_family:
    layout = _member(layout, profile)
  _check_names(layout, profile, is_certain)
  if layout.options or layout.wrong:
    return _ChoiceCheck(layout, profile, is_certain)
  return _TextCheck(layout, profile, is_certain)


def _member(family, profile):
  """Returns the layout of a family whose names a file has. Raises Misfit: it has none, or two."""
  questions = [name for name in family.question.split('|') if name in profile.facts]
  ((alternatives, kind),) = family.answers.items()
  answers = [name for name in alternatives.split('|') if name in profile.facts]
  answers += [name for name in alternatives.split('|') if name in profile.names]
  options = []
  for name in family.options.split('|') if family.options else ():
    member = dataclasses.replace(family, options=name)
    if set(values_lib.option_columns(member, profile.names)) & profile.facts.keys():
      options.append(name)
  for name in list(options):
    if name.endswith('1..') and name.replace('1..', '0..') in options:
      options.remove(name)
  if len(questions) != 1 or not answers or family.options and len(options) != 1:
    raise Misfit(profile.first.number, '')
  return dataclasses.replace(
      family, question=questions[0], answers={answers[0]: kind}, options=''.join(options)
  )


def _check_names(layout, profile, is_certain):
  number = profile.first.number
  needed = [layout.question, *layout.wrong, layout.before, layout.flag]
  needed += [layout.id, layout.split, layout.passages]
  missing = [name for name in filter(None, needed) if name not in profile.facts]
  missing += [name for name in (*layout.needs, *layout.answers) if name not in profile.names]
  missing += [name for name in layout.lacks if name in profile.facts]
  options = values_lib.option_columns(layout, profile.names)
  fewest = 2 if str(layout.options).endswith('..') else 1
  if layout.options and len(options) < fewest:
    missing.append(str(layout.options))
  if len(set(options) & profile.facts.keys()) < fewest:
    missing += options
  is_other = layout.suffix and not profile.path.name.endswith(layout.suffix)
  if missing or is_other:
    raise Misfit(number, f'no column {missing[0]!r}' if is_certain else '')


def _check_own_names(profile):
  answers = profile.first.fields.get('answers')
  is_list = types.is_of(answers, list[str]) and bool(answers)
  texts = [name for name, facts in profile.facts.items() if facts.num > facts.num_numbers]
  has_own = {'gold', 'hops', 'steps', 'options'} & profile.facts.keys()
  if (
      not is_list
      or 'question' not in profile.facts
      or not has_own
      and set(profile_lib.PASSAGES) & set(texts)
  ):
    raise Misfit(profile.first.number, '')


def _unread(layout, profile, options):
  """Returns the columns that a layout does not read. Raises Misfit if the question needs one."""
  passages = [name for name in profile_lib.PASSAGES if name in profile.facts][:1]
  read = {layout.question, *layout.answers, *options, layout.before, layout.flag, layout.spans}
  read |= {*profile_lib.COMMON, *passages}
  unread = []
  for name in profile.facts:
    is_inside = any(name.startswith(f'{column}.') for column in read - {''})
    is_outside = any(column.startswith(f'{name}.') for column in read)
    is_ignored = any(fnmatch.fnmatchcase(name, pattern) for pattern in layout.ignores)
    if name not in read and not is_inside and not is_outside and not is_ignored:
      unread.append(name)
  for name in unread:
    is_own_passage = layout is OWN and name in profile_lib.PASSAGES
    if profile_lib.may_be_context(name, profile.facts[name]) and not is_own_passage:
      complaint = f'column {name!r} is not read, and the question may need it'
      raise Misfit(profile.first.number, complaint)
  return unread


class _ChoiceCheck(_Check):
  """Whether the answers of a file name one of the options."""

  def __init__(self, layout: SetLayout, profile: profile_lib.Profile, is_certain: bool):
    super().__init__(layout, profile, is_certain)
    all_kinds: dict[str, tuple[str, ...]] = {}
    for name, kind in layout.answers.items():
      all_kinds[name] = layouts.CHOICE_KINDS if kind == layouts.ANY else (kind,)
    all_kinds |= dict.fromkeys(self.guests, layouts.CHOICE_KINDS)
    self._all_kinds = all_kinds
    self._kinds = dict(all_kinds)  # by column, those in which each row has named an option
    self._unanswered: dict[str, int] = {}  # by column, a row in which only it has an answer
    self._has_values: set[str] = set()
    # By two ways to name an option, a row in which they differ, and the value there.
    self._rows: dict[frozenset[tuple[str, str]], tuple[int, str]] = {}
    self._last: dict[str, tuple[int, str]] = {}  # by column, the row that ends its last kind

  def add(self, number, fields):
    super().add(number, fields)
    choice = values_lib.choice_of(self.layout, fields, self.options)
    self._compare_lists(fields, choice)
    letters: dict[tuple[str, str], str] = {}
    present: dict[str, Any] = {}
    for name in list(self._kinds):
      try:
        value = values_lib.named(name, values_lib.get(fields, name), choice or _NO_CHOICE)
      except values_lib.Unanswerable:
        continue
      if value is None:
        continue
      if choice is None:
        if name in self.layout.answers:
          columns = cells.listed(self.options)
          raise Misfit(number, f'column {name!r} is {shown(value)}, without options in {columns}')
        continue
      present[name] = value
      named = {kind: values_lib.letter_of(kind, value, choice) for kind in self._all_kinds[name]}
      left = tuple(kind for kind in self._kinds[name] if named[kind] is not None)
      if self._kinds[name] and not left:
        self._last[name] = (number, f'{shown(value)}: none of the {len(choice.texts)} options')
      self._kinds[name] = left
      letters |= {(name, kind): letter for kind, letter in named.items() if letter}
    self._has_values.update(present)
    if present and not any(name in self.layout.answers for name in present):
      self._unanswered.update(
          {name: number for name in present if profile_lib.is_answer_name(name)}
      )
    for pair in itertools.combinations(letters, 2):
      if letters[pair[0]] != letters[pair[1]] and frozenset(pair) not in self._rows:
        self._rows[frozenset(pair)] = (number, shown(present[pair[0][0]]))

  def _compare_lists(self, fields, choice):
    """Notes which columns that are not read may hold as many options."""
    for columns in list(self.lists):
      cell = [values_lib.get(fields, name) for name in columns]
      texts = values_lib.texts_in(cell if len(columns) > 1 else cell[0])
      if choice is not None and len(texts) != len(choice.positions or choice.texts):
        self.lists.remove(columns)

  def _difference(self, name, kind, other, other_kind):
    """Returns a row in which two ways name different options, or None."""
    return self._rows.get(frozenset([(name, kind), (other, other_kind)]))

  def reading(self):
    kinds = {}
    unclear = {}
    for name, kind in self.layout.answers.items():
      if name not in self._has_values:
        continue
      left = self._kinds[name]
      if not left:
        number, value = self._last[name]
        raise Misfit(number, f'column {name!r} is {value}')
      clash = self._clash(name) if kind == layouts.ANY else None
      if clash is not None:
        unclear[name] = clash
      else:
        kinds[name] = left[0]
    if unclear and not kinds:
      name, (number, value) = next(iter(unclear.items()))
      left = self._kinds[name]
      ways = ' or '.join(_MEANINGS[kind] for kind in left)
      complaint = f'column {name!r} is {value}, and no row tells whether it is {ways}'
      if len(left) == 1:
        complaint = f'column {name!r} is {value}, the text of an option and the letter of another'
      raise Misfit(number, complaint)
    for columns in self.lists:
      message = f'columns {cells.listed(columns)} may be the options, too'
      raise Misfit(self.profile.first.number, message)
    for name, number in self._unanswered.items():
      raise Misfit(number, f'column {name!r} may be the answer, and is not read')
    for name in [*unclear, *kinds, *self.guests]:
      if name in self._has_values:
        self._check_agrees(name, kinds)
    return Reading(self.layout, kinds, self.options, has_answers=bool(kinds))

  def _clash(self, name):
    """Returns a row in which two kinds of a column name different options, or None."""
    for kind, other in itertools.combinations(layouts.CHOICE_KINDS, 2):
      number = self._difference(name, kind, name, other)
      is_open = {kind, other} <= set(self._kinds[name]) or {kind, other} == {'text', 'letter'}
      if number is not None and is_open:
        return number
    return None

  def _check_agrees(self, name, kinds):
    """Raises Misfit if a column names other options than the columns with clear kinds."""
    left = (kinds[name],) if name in kinds else self._kinds[name]
    if not left and not profile_lib.is_answer_name(name):
      return  # a number or a key of something else
    rows = []
    for kind in left:
      row = [self._difference(name, kind, other, kinds[other]) for other in kinds]
      rows.append(next(filter(None, row), None))
    # One way to agree is enough for a column of the layout, whose meaning others may settle.
    agrees = None in rows if name in self.layout.answers else bool(rows) and not any(rows)
    if agrees:
      return
    first = next(filter(None, rows), None) or self._last.get(name, (self.profile.first.number, ''))
    other = next((other for other in kinds if other != name), '')
    names = sorted([name, other], key=[*self.layout.answers, name].index)
    raise Misfit(first[0], f'columns {names[0]!r} and {names[1]!r} name different options')


_NO_CHOICE = values_lib.RowOptions({}, [], {})


class _TextCheck(_Check):
  """Whether the answers of a file are texts, truths or decisions."""

  def __init__(self, layout: SetLayout, profile: profile_lib.Profile, is_certain: bool):
    super().__init__(layout, profile, is_certain)
    for columns in self.lists:
      if profile_lib.OPTION_NAME.search(columns[0].lower()):
        complaint = f'columns {cells.listed(columns)} may be the options'
        raise Misfit(profile.first.number, complaint)
    name = profile.path.name.lower()
    self._is_table = '.csv' in name or '.tsv' in name  # tables hold texts alone
    self._num_answers = 0
    self._num_bare = 0  # letters and numbers, which may name an option
    self._num_lists = 0  # rows with several answers
    # By column, rows in which it may say which of several answers is right.
    self._num_choosing: dict[str, int] = {}
    self._num_hidden = 0  # rows whose answer may name an option within an unread text
    self._num_in: dict[tuple[str, ...], int] = {}  # by columns, rows whose answer is one of them
    self._num_truths = 0
    self._flags: dict[str, set[bool]] = {}  # by question
    self._in_range: dict[str, bool] = {}  # by guest, whether its values may be positions
    self._in_list: dict[str, bool] = {}  # by guest, whether a value is one of several answers

  def add(self, number, fields):
    layout = self.layout
    try:
      values_lib.check_state(fields)
    except values_lib.Unanswerable:
      return
    super().add(number, fields)
    value = values_lib.get(fields, next(iter(layout.answers)))
    is_truth = layouts.TRUTH in layout.answers.values()
    if is_truth and isinstance(value, str) and not self._is_table:
      raise Misfit(number, f'{shown(value)} is a text, and no truth')
    try:
      answers = values_lib.texts_of(layout, fields)
    except values_lib.Unanswerable:
      for name in filter(profile_lib.is_answer_name, self.guests):
        if values_lib.is_empty(value) and not values_lib.is_empty(values_lib.get(fields, name)):
          complaint = f'nothing and {shown(values_lib.get(fields, name))}'
          self.differences.setdefault(name, (number, complaint))
      return
    if layout.flag:
      is_right = cells.flag(layout.flag, values_lib.get(fields, layout.flag))
      question = str(values_lib.get(fields, layout.question))
      self._flags.setdefault(question, set()).add(is_right)
    self._num_answers += 1
    self._num_truths += answers[0].lower() in ('true', 'false')
    self._num_bare += bool(profile_lib.BARE.fullmatch(answers[0]))
    self._num_lists += len(answers) > 1
    for name in self.unread:
      if _chooses(values_lib.get(fields, name), answers):
        self._num_choosing[name] = self._num_choosing.get(name, 0) + 1
    self._num_hidden += len(answers) == 1 and self._may_be_hidden(fields, answers[0])
    for columns in self.lists:
      cell = [values_lib.get(fields, name) for name in columns]
      texts = cell if len(columns) > 1 else values_lib.texts_in(cell[0])
      is_in = any(answer in texts for answer in answers)
      self._num_in[columns] = self._num_in.get(columns, 0) + is_in
    for name in self.guests:
      value = values_lib.get(fields, name)
      if not values_lib.is_empty(value):
        self._compare(number, name, value, answers)

  def _may_be_hidden(self, fields, answer):
    """Returns whether an answer may name one of the texts in the columns that are not read."""
    cells_of_row = {name: values_lib.get(fields, name) for name in self.unread}
    columns = [name for name, text in cells_of_row.items() if isinstance(text, str)]
    if answer in columns:
      return True
    if any(profile_lib.OPTION_NAME.search(name.lower()) for name in columns):
      return bool(profile_lib.BARE.fullmatch(answer))
    is_letter = bool(re.fullmatch(r'\(?[A-J]\)?', answer))
    question = str(values_lib.get(fields, self.layout.question))
    return is_letter and bool(columns) and not profile_lib.has_letters(question)

  def _compare(self, number, name, value, answers):
    """Compares an answer with the value of a column that may name another one."""
    try:
      texts = values_lib.texts_of_value(name, value)
    except ValueError:
      texts = [shown(value)]
    is_same = {text.casefold() for text in texts} == {text.casefold() for text in answers}
    is_end = len(answers) == 1 and len(texts) == 1 and texts[0].endswith(f'#### {answers[0]}')
    position = values_lib.whole(value)
    is_letter = len(texts) == 1 and bool(re.fullmatch('[A-Ja-j]', texts[0]))
    is_position = is_letter or position is not None and 0 <= position <= len(answers)
    self._in_range[name] = self._in_range.get(name, True) and is_position
    is_one = len(answers) > 1 and any(text in answers for text in texts)
    self._in_list[name] = self._in_list.get(name, False) or is_one
    if not is_same and not is_end:
      first = answers[0] if len(answers) == 1 else shown(list(answers))
      complaint = f'{first} and {shown(value)}'
      self.differences.setdefault(name, (number, complaint))

  def reading(self):
    layout = self.layout
    number = self.profile.first.number
    name = next(name for name in layout.answers)
    kind = layout.answers[name]
    are_truths = self._num_answers and self._num_truths == self._num_answers
    if kind == 'text' and self._is_table and are_truths:
      raise Misfit(number, f'column {name!r} holds truths')
    if layout.flag and not any(len(flags) > 1 for flags in self._flags.values()):
      raise Misfit(number, f'column {layout.flag!r} may say that answers are wrong')
    for guest, (row, complaint) in self.differences.items():
      if self._is_other_answer(guest):
        message = f'columns {name!r} and {guest!r} may both be the answer, as in {complaint}'
        raise Misfit(row, message)
    for column, num_rows in self._num_choosing.items():
      if num_rows == self._num_answers:
        message = f'column {column!r} may say which one of the answers in {name!r} is right'
        raise Misfit(number, message)
    if self._num_answers and self._num_hidden == self._num_answers:
      raise Misfit(number, f'column {name!r} may name an option in a column that is not read')
    for columns in self.lists:
      is_named = self._num_answers and self._num_bare == self._num_answers
      if is_named or self._num_answers and self._num_in.get(columns) == self._num_answers:
        message = f'columns {cells.listed(columns)} may be the options, and are not read'
        raise Misfit(number, message)
    return Reading(layout, dict(layout.answers), (), has_answers=self._num_answers > 0)

  def _is_other_answer(self, guest):
    """Returns whether a column whose values differ from the answers may name another one."""
    facts = self.profile.facts[guest]
    if profile_lib.is_answer_name(guest):
      return True
    is_scalar = facts.num == facts.num_texts + facts.num_numbers
    if self._num_lists:
      return not is_scalar or self._in_range[guest] or self._in_list[guest]
    is_flag = 'label' in profile_lib.words_of(guest) and self._in_range[guest]
    return is_flag or facts.num > facts.num_ids + facts.num_numbers


def _chooses(value: object, answers: Sequence[str]) -> bool:
  """Returns whether a value may say which one of several answers is right."""
  if len(answers) < 2:
    return False
  value = values_lib.value_of(value)
  if isinstance(value, list):  # a number or a truth for each
    return len(value) == len(answers) and types.is_of(value, list[float | int | bool])
  if isinstance(value, str) and value in answers:
    return True
  position = values_lib.whole(value)
  is_letter = isinstance(value, str) and bool(re.fullmatch('[A-Ja-j]', value))
  return is_letter or position is not None and 0 <= position <= len(answers)


class _OwnCheck(_TextCheck):
  """Whether a file is one of our own, in which some questions may have options."""

  def add(self, number, fields):
    options = fields.get('options')
    answer = fields.get('answer')
    answers = fields.get('answers')
    if not types.is_of(answers, list[str]) or not answers:
      return  # the reader of our own files complains
    super().add(number, fields)
    if types.is_of(options, dict[str, str]) and options:
      others = [text for text in options.values() if text != options.get(answer)]
      is_wrong = bool(set(others) & set(answers))
    else:
      is_wrong = not options and not values_lib.is_empty(answer) and [answer] != answers
    if is_wrong:
      raise Misfit(number, "columns 'answers' and 'answer' may both be the answer")


def _refusal(profile, misfits, columns):
  """Returns the error about a file that fits no layout."""
  first = profile.first
  ranked = [pair for pair in misfits if str(pair[1])]
  number = first.number
  complaint = _missing(profile)
  suggestion: Mapping[str, object] | None = None
  if ranked:
    _, misfit = max(ranked, key=lambda pair: pair[0])
    suggestion = misfit.columns or _suggestion(profile, misfit.text)
    number = misfit.number
    complaint = str(misfit)
  message = f'{profile.path}:{number}: {complaint}'
  listed = cells.listed(first.fields)
  suggestion = suggestion or _suggestion(profile, '')
  if columns:
    return types.UserError(f'{message}: correct config.data.columns; the columns are {listed}')
  return types.UserError(
      f'{message}. No published layout fits for certain. The columns are {listed}, the first row '
      f'is {cells.shown_row(first.fields)}. Name the columns: '
      f'--config.data.columns="{suggestion}"'
  )


def _missing(profile):
  """Returns what is missing in a file that fits no layout by the names of its columns."""
  listed = cells.listed(profile.first.fields)
  for name in ('prompt', *profile_lib.QUESTIONS):
    if name in profile.names and not any(
        question in profile.facts for question in profile_lib.QUESTIONS
    ):
      return f'column {name!r} is empty: a question is needed'
  if not any(question in profile.names for question in profile_lib.QUESTIONS):
    return (
        f'no question in the columns {listed}: one of {", ".join(profile_lib.QUESTIONS)} is needed'
    )
  for layout in layouts.LAYOUTS:
    for name in layout.answers:
      outer, _, inner = name.partition('.')
      if inner and outer in profile.names and layout.question in profile.facts:
        value = values_lib.get(profile.first.fields, outer)
        return f'column {outer!r} is {shown(value)}: a {inner!r} in it is needed'
  return f'no known answer in the columns {listed}'


def _suggestion(profile, text):
  """Returns a value of data.columns for a file, with the columns that may be meant.

  `text` is a column that the question may need, or ''.
  """
  names = list(profile.facts)
  questions = [name for name in (*profile_lib.QUESTIONS, *names) if name in names]
  answers = [name for name in names if profile_lib.is_answer_name(name)]
  answers += [name for name in names if profile_lib.may_name_answer(name)]
  answers = [name for name in answers if not profile.facts[name].is_prose]
  rows = [list(row) for row in profile_lib.rows_of_columns(profile.names, names)]
  options = [name for name in names if profile.facts[name].num_lists and name not in answers[:1]]
  columns: dict[str, Any] = {
      'question': (questions or ['COLUMN'])[0],
      'answers': (answers or ['COLUMN'])[0],
  }
  if options or rows:
    columns['options'] = (options or rows)[0]
    columns['answer_is'] = '|'.join(layouts.CHOICE_KINDS)
  contexts = [name for name in names if _may_be_context(name, profile)]
  contexts = [name for name in contexts if name != columns['question']]
  texts = [name for name in contexts if profile.facts[name].num_texts]
  if text or texts:
    columns['context'] = text or texts[0]
  elif contexts:
    columns['passages'] = contexts[0]
  return columns


def _may_be_context(name, profile):
  return not profile_lib.is_media(name) and profile_lib.may_be_context(name, profile.facts[name])
