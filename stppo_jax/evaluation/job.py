"""Evaluation as a separate job: a checkpoint or an address in, scores with intervals out.

The job plays the held-out questions once and greedily, or several times. It keeps the episodes in a
folder, so that the same command continues a job that was stopped:

  rows (question, sample) -> episodes, in batches -> lines of a file -> estimates -> tables
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time

from absl import logging

from stppo_jax import types
from stppo_jax.config import Config
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import players
from stppo_jax.evaluation import policy
from stppo_jax.evaluation import records
from stppo_jax.evaluation import remote
from stppo_jax.evaluation import table
from stppo_jax.monitoring import outcomes
from stppo_jax.monitoring import scores as scores_lib
from stppo_jax.settings import validation
from stppo_jax.stop_signal import NEVER
from stppo_jax.stop_signal import StopSignal

_PROGRESS_S = 10.0  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class EvaluationResults:
  """The results of an evaluation."""

  folder: str
  scores: Mapping[str, float]  # under the names of metrics.jsonl
  groups: Sequence[estimates.Group]
  table: str


def evaluate(
    config: Config, workdir: str, stop_signal: StopSignal = NEVER
) -> EvaluationResults | None:
  """Plays the remaining episodes, and returns the results on the process that writes.

  Returns None on the other processes, and after `stop_signal`, when the same command
  continues the job.
  """
  validation.validate(config)
  hosts.require_same('config', dataclasses.asdict(config))
  player: players.Player
  if config.eval.address:
    player = remote.RemotePlayer(config, stop_signal)
  else:
    player = players.LocalPlayer(config, workdir, stop_signal)
  _check_ids(player.tasks)
  settings = _settings(config, player)
  path = config.eval.folder or os.path.join(workdir, 'eval', _folder_name(config, player, settings))
  folder = records.EvaluationFolder(path, settings, player.tasks)
  with contextlib.ExitStack() as resources:
    hosts.by_writer(lambda: resources.enter_context(folder.opened()))
    try:
      _play(player, players.rows_of(player.tasks, config.eval.samples), folder)
    except types.Stopped:
      logging.info('stopped on request; the same command continues %s', path)
      return None
    return _results(config, player, folder) if hosts.is_writer() else None


def _check_ids(tasks: Sequence[types.Task]) -> None:
  """Raises a UserError for questions with one id, because their lines would be the same."""
  for name, count in collections.Counter(task.id for task in tasks).items():
    if count > 1:
      raise types.UserError(
          f'{count} of the held-out questions have the id {name!r}: give each task its own id'
      )


def _play(
    player: players.Player, rows: list[records.Row], folder: records.EvaluationFolder
) -> None:
  """Plays the rows that have no line, and adds their lines.

  Rows that are played in batches are played again with the same neighbours, so that the numbers are
  those of a job that was not stopped.
  """
  keys = hosts.by_writer(lambda: list(folder.episodes()))
  done = {tuple(key) for key in keys}
  counts = collections.Counter(key[:2] for key in done)  # by the row's key
  total = len(rows) * player.rows_per_episode
  if done:
    logging.info('%d of %d episodes were played before, in %s', len(done), total, folder.path)

  def is_done(row):
    return counts[row.key] == player.rows_per_episode

  if player.batch:
    batches = [rows[i : i + player.batch] for i in range(0, len(rows), player.batch)]
  else:
    batches = [[row for row in rows if not is_done(row)]]
  reported = time.monotonic()
  for batch in batches:
    if all(map(is_done, batch)):
      continue
    for played in player.play(batch):
      if hosts.is_writer() and played.key not in done:
        folder.add(played)
      done.add(played.key)
      if time.monotonic() - reported > _PROGRESS_S or len(done) == total:
        reported = time.monotonic()
        logging.info('%d of %d episodes', len(done), total)


def _results(
    config: Config, player: players.Player, folder: records.EvaluationFolder
) -> EvaluationResults:
  """Computes and writes the results of all lines."""
  rows = players.rows_of(player.tasks, config.eval.samples)
  episodes = folder.episodes_of(rows)
  groups = []
  for prefix, samples in records.samples_by_agent(episodes).items():
    for group in estimates.groups(samples):
      groups.append(dataclasses.replace(group, name=prefix + group.name))
  scores = scores_lib.scores(episodes)
  outcome_counts = outcomes.from_metrics('val-outcome', scores)
  ended = ', '.join(f'{name} {number}' for name, number in outcome_counts.items() if number)
  remarks = f'{scores["val-aux/agent_turns/mean"]:.2f} turns per episode; {ended}.'
  title = f'{config.data.eval_split}, {_sampling_text(config)}: {player.description}'
  text = table.text(title, groups, remarks)
  results = {
      'title': title,
      'samples': config.eval.samples,
      'scores': scores,
      'outcomes': outcome_counts,
      'groups': [dataclasses.asdict(group) for group in groups],
  }
  folder.write_results(results, text)
  return EvaluationResults(folder.path, scores, groups, text)


def _settings(config: Config, player: players.Player) -> dict[str, object]:
  """Returns what the episodes depend on."""
  return {
      **policy.depends_on(config, player.tasks),
      'samples': config.eval.samples,
      'temperature': players.temperature(config),
      'player': dict(player.identity),
  }


def _folder_name(config: Config, player: players.Player, settings: Mapping[str, object]) -> str:
  """Returns the name of the folder of an evaluation with these settings."""
  text = json.dumps(settings, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  temperature = players.temperature(config)
  sampling = f't{temperature:g}' if temperature else 'greedy'
  if config.eval.samples > 1:
    sampling = f'{config.eval.samples}_{sampling}'
  name = f'{config.data.eval_split}_{player.label}_{sampling}_{digest}'
  return re.sub(r'[^\w.-]+', '-', name)


def _sampling_text(config: Config) -> str:
  temperature = players.temperature(config)
  text = f'at temperature {temperature:g}' if temperature else 'greedy'
  return f'{config.eval.samples} samples {text}' if config.eval.samples > 1 else text
