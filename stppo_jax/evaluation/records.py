"""The folder of an evaluation: its settings, and a line per episode, in the order they ended.

config.json      what the episodes depend on; the folder rejects other settings
episodes.jsonl   one line per question, sample and role; an interrupted job plays the rest
results.json  results.md    of all lines
provenance.jsonl   a line per start: code, packages, devices, command
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
from typing import NamedTuple

from stppo_jax import types
from stppo_jax.monitoring import provenance
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.types import UserError

Key = tuple[str, int, str]  # id of the question, number of the sample, role


class Row(NamedTuple):
  """A sample of a question."""

  task: types.Task
  sample: int

  @property
  def key(self) -> tuple[str, int]:
    """Identifies the row."""
    return self.task.id, self.sample


@dataclasses.dataclass(frozen=True)
class PlayedRow:
  """An episode of a row, with the texts of its turns."""

  row: Row
  episode: types.Episode
  texts: Sequence[tuple[str, str]]  # (the agent's text, the observation that followed)

  @property
  def key(self) -> Key:
    """Identifies the line."""
    return *self.row.key, self.episode.role


class EvaluationFolder:
  """The folder of an evaluation.

  Args:
    path: of the folder.
    settings: what the episodes depend on, as nested dicts.
    tasks: the questions.
  """

  def __init__(self, path: str, settings: Mapping[str, object], tasks: Sequence[types.Task]):
    self.path = path
    self._settings = settings
    self._tasks = {task.id: task for task in tasks}
    self._lines = os.path.join(path, 'episodes.jsonl')

  @contextlib.contextmanager
  def opened(self) -> Iterator[None]:
    """Locks the folder, checks its settings, and opens the file of lines."""
    with workdir_lib.lock(self.path):
      if os.path.exists(self._lines) and os.path.getsize(self._lines):
        self._check_settings()
      self._write('config.json', json.dumps(self._settings, indent=2))
      provenance.record(self.path)
      with open(self._lines, 'ab+') as self._file:
        self._file.seek(0)
        end = self._file.read().rfind(b'\n') + 1
        self._file.truncate(end)  # a killed job leaves half a line
        yield

  def add(self, played: PlayedRow) -> None:
    """Appends the line of an episode: `Episode.to_dict`, the sample, and the texts of the turns."""
    line = played.episode.to_dict()
    line['sample'] = played.row.sample
    line['turns'] = [{'agent': text, 'observation': read} for text, read in played.texts]
    self._file.write(json.dumps(line).encode() + b'\n')
    self._file.flush()

  def episodes(self) -> dict[Key, types.Episode]:
    """Returns the episodes of all lines."""
    episodes = {}
    with open(self._lines, encoding='utf-8') as lines:
      for number, line in enumerate(lines, start=1):
        try:
          record = json.loads(line)
          episode = types.Episode.from_dict(record, self._tasks[record['task']])
          episodes[episode.task.id, record['sample'], episode.role] = episode
        except (ValueError, KeyError, TypeError, AttributeError) as error:
          raise UserError(
              f'{self._lines}:{number}: not a line of this evaluation '
              f'({type(error).__name__}): delete the line, and give the same command again'
          ) from error
    return episodes

  def episodes_of(self, rows: Sequence[Row]) -> list[types.Episode]:
    """Returns the episodes of these rows, in the same order."""
    by_row: dict[tuple[str, int], list[types.Episode]] = {}
    for (task_id, sample, _), episode in self.episodes().items():
      by_row.setdefault((task_id, sample), []).append(episode)
    return [episode for row in rows for episode in by_row[row.key]]

  def write_results(self, results: Mapping[str, object], table: str) -> None:
    """Writes results.json and results.md."""
    self._write('results.json', json.dumps(results, indent=2))
    self._write('results.md', table)

  def _write(self, name, text):
    workdir_lib.write_whole(os.path.join(self.path, name), text)

  def _check_settings(self):
    if different := workdir_lib.differences(self.path, self._settings):
      raise UserError(
          f'{self.path} holds an evaluation with other settings: '
          f'{workdir_lib.enumerate_first(different.values())}. Give the same settings, or another '
          '--config.eval.folder'
      )


def samples_by_agent(
    episodes: Sequence[types.Episode],
) -> dict[str, dict[str, list[types.Episode]]]:
  """Returns {prefix of names in tables: {id of a question: its samples}}, by the role of the rows.

  Rows of a role that never moved are left out.
  """
  samples: dict[str, dict[str, list[types.Episode]]] = {}
  for episode in episodes:
    if not episode.absent:
      prefix = f'{episode.role}: ' if episode.role else ''
      by_question = samples.setdefault(prefix, {})
      by_question.setdefault(episode.task.id, []).append(episode)
  return samples
