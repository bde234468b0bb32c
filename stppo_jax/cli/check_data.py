"""The mode that shows how a file of questions or conversations is read."""

import collections
from collections.abc import Iterable
from collections.abc import Iterator

from stppo_jax.cli.command import Command
from stppo_jax.cli.command import show
from stppo_jax.config import DataSettings
from stppo_jax.data import cells
from stppo_jax.data import conversations
from stppo_jax.data import row_files
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.settings.sections import data_columns

_NUM_SHOWN = 5  # questions, conversations and reasons
_MOST_CHARS = 400  # characters of a text that is shown


def check_data(command: Command) -> None:
  """Prints the layout of a file, some of its rows, and the rows that are left out."""
  (source,) = command.operands
  config = command.config
  config.data.source = source
  if config.data.columns:
    data_columns.check(config)
  data = config.data
  show('\n'.join(text(source, data, config.sft.min_reward)))


def text(source: str, data: DataSettings, min_reward: float) -> list[str]:
  """Returns the lines about a source. UserError: it is not certain how it is read."""
  paths = tasks_lib.files_of(source)
  if data.columns:
    is_chat = 'question' not in data.columns
  else:
    is_chat = all(_is_chat(path) for path in paths)
  if is_chat:
    return list(_about_conversations(source, data, min_reward))
  return list(_about_questions(source, data))


def _is_chat(path):
  """Returns whether a file holds conversations, and no questions with an answer."""
  first = next(row_files.read(path), None)
  return first is not None and conversations.is_conversation(first.fields)


def _about_questions(source, data) -> Iterator[str]:
  loaded = tasks_lib.load_all(source, data.columns)
  for path, reading in loaded.readings.items():
    yield f'{path}: {reading}'
  for task in loaded.tasks[:_NUM_SHOWN]:
    yield f'\n{task.id}: {_cut(task.question)}'
    for letter, option in task.options:
      mark = ' <- right' if letter == task.letter else ''
      yield f'  {letter}  {_cut(option)}{mark}'
    if not task.options:
      yield f'  accepted: {" | ".join(map(_cut, task.answers))}'
  counts = collections.Counter(task.split or 'in every split' for task in loaded.tasks)
  yield from _counts(len(loaded.tasks), 'questions', counts)
  reasons = collections.Counter(reason.partition(': ')[2] for reason in loaded.unanswered)
  yield from _left_out(reasons)


def _about_conversations(source, data, min_reward) -> Iterator[str]:
  splits: collections.Counter[str] = collections.Counter()
  reasons: collections.Counter[str] = collections.Counter()
  lines = []
  for path, split in tasks_lib.files_of(source).items():
    columns = data.columns
    names = list(columns.values()) if columns else conversations.find_source(path)
    yield f'{path}: conversations in {cells.listed(names)}'
    for row, conversation in conversations.read(path, min_reward, columns):
      if isinstance(conversation, str):
        reasons[conversation] += 1
        continue
      splits[conversation.split or split or 'no split'] += 1
      if splits.total() <= _NUM_SHOWN:
        lines.append(f'\n{path.name}:{row.number}, {len(conversation.tools)} tools')
        lines += _shown_messages(conversation.messages)
  yield from lines
  yield from _counts(splits.total(), 'conversations', splits)
  yield from _left_out(reasons)


def _shown_messages(messages: Iterable[conversations.Message]) -> Iterator[str]:
  for message in messages:
    mark = ' (imitated)' if message.get('trained') else ''
    calls = [call['function']['name'] for call in message.get('tool_calls', ())]
    call = f' calls {", ".join(calls)}' if calls else ''
    yield f'  {message["role"]}{mark}:{call} {_cut(message["content"])}'


def _counts(total, kind, counts) -> Iterator[str]:
  by_split = ', '.join(f'{split} {number}' for split, number in counts.items())
  yield f'\n{total} {kind}: {by_split or "none"}'


def _left_out(reasons) -> Iterator[str]:
  yield f'{reasons.total()} rows left out'
  for reason, number in reasons.most_common(_NUM_SHOWN):
    yield f'  {number}: {reason}'


def _cut(value: str) -> str:
  line = ' '.join(value.split())
  return line if len(line) <= _MOST_CHARS else f'{line[:_MOST_CHARS]}..'
