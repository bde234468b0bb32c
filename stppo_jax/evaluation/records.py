"""The folder of an evaluation: its settings, and a line per episode, in the order they came.

config.json      what the episodes depend on; the folder refuses others
episodes.jsonl   an episode per (question, sample); what a killed job left is played on
results.json  results.md    of all of them
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
from typing import Any

from stppo_jax import types
from stppo_jax.monitoring import workdir as workdirs
from stppo_jax.types import UserError

Key = tuple[str, int, str]  # of a line: id of the question, number of the sample, role


@dataclasses.dataclass(frozen=True)
class Row:
  """A sample of a question, which is played or to be played."""

  task: types.Task
  sample: int

  @property
  def key(self) -> tuple[str, int]:
    """What it is found by."""
    return self.task.id, self.sample


@dataclasses.dataclass(frozen=True)
class Played:
  """A row's episode, with the texts of its turns: what the agent said, and what it read then."""

  row: Row
  episode: types.Episode
  texts: Sequence[tuple[str, str]]

  @property
  def key(self) -> Key:
    """What its line is found by: each role has one."""
    return *self.row.key, self.episode.role


class Folder:
  """An evaluation's folder, held by this process. A context manager.

  Args:
    path: of the folder.
    settings: what the episodes depend on, as nested dicts.
    tasks: the questions.
  """

  def __init__(self, path: str, settings: Mapping[str, Any], tasks: Sequence[types.Task]):
    self.path, self._settings = path, settings
    self._tasks = {task.id: task for task in tasks}
    self._resources = contextlib.ExitStack()

  def __enter__(self) -> 'Folder':
    with contextlib.ExitStack() as resources:
      resources.enter_context(workdirs.lock(self.path))
      self._claim()
      self._drop_cut_line()
      self._file = resources.enter_context(open(self._episodes, 'a', encoding='utf-8'))
      self._resources = resources.pop_all()
    return self

  def __exit__(self, *unused_error: Any) -> None:
    self._resources.close()

  def add(self, played: Played) -> None:
    """Appends the line of an episode."""
    self._file.write(json.dumps(_to_line(played)) + '\n')
    self._file.flush()

  def episodes(self) -> dict[Key, types.Episode]:
    """Returns the episodes of all lines, without their tokens."""
    found = {}
    with open(self._episodes, encoding='utf-8') as lines:
      for number, line in enumerate(lines, start=1):
        try:
          row, episode = _from_line(json.loads(line), self._tasks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
          raise UserError(
              f'{self._episodes}:{number}: not a line of this evaluation '
              f'({type(error).__name__}): delete the line, and give the same command again'
          ) from error
        found[*row.key, episode.role] = episode
    return found

  def write_results(self, results: Mapping[str, Any], table: str) -> None:
    """Writes results.json and results.md."""
    workdirs.write_whole(os.path.join(self.path, 'results.json'), json.dumps(results, indent=2))
    workdirs.write_whole(os.path.join(self.path, 'results.md'), table)

  @property
  def _episodes(self):
    return os.path.join(self.path, 'episodes.jsonl')

  def _claim(self):
    if os.path.exists(self._episodes) and os.path.getsize(self._episodes):
      if different := list(workdirs.differences(self.path, self._settings).values()):
        more = f' and {len(different) - 4} more' if len(different) > 4 else ''
        raise UserError(
            f'{self.path} holds an evaluation by other settings: {", ".join(different[:4])}{more}. '
            'Give the same ones, or another --config.eval.folder'
        )
    workdirs.write_whole(
        os.path.join(self.path, 'config.json'), json.dumps(self._settings, indent=2)
    )

  def _drop_cut_line(self):
    """Removes the end of a line whose writing was cut short."""
    if not os.path.exists(self._episodes):
      return
    with open(self._episodes, 'rb+') as file:
      file.truncate(file.read().rfind(b'\n') + 1)


# Fields of `Episode.to_dict` that a line holds.
_FIELDS = 'dataset hops question answers score metrics core_metrics counts truncated failed'.split()


def _to_line(played: Played) -> dict[str, Any]:
  """Returns the line of an episode: the fields that scores depend on, and its texts."""
  record = played.episode.to_dict()
  line = {'id': played.row.task.id, 'sample': played.row.sample, 'role': played.episode.role}
  line |= {name: record[name] for name in _FIELDS}
  line['error'] = played.episode.error
  line['turns'] = [
      {
          'agent': agent,
          'observation': observation,
          'action': turn.action,
          'reward': turn.reward,
          'tokens': len(turn.tokens),
      }
      for turn, (agent, observation) in zip(played.episode.turns, played.texts, strict=True)
  ]
  return line


def _from_line(
    line: Mapping[str, Any], tasks: Mapping[str, types.Task]
) -> tuple[Row, types.Episode]:
  """Inverts `_to_line`, without texts and tokens."""
  row = Row(tasks[line['id']], line['sample'])
  fields = {
      'group': row.sample,
      'actions': [turn['action'] for turn in line['turns']],
      'rewards': [turn['reward'] for turn in line['turns']],
  }
  return row, types.Episode.from_dict({**line, **fields}, row.task)
