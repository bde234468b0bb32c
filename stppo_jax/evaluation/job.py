"""Evaluation as a job of its own: a checkpoint or an address in, scores with intervals out.

The held-out questions are played once and greedily, or several times. What was played stays in a
folder, so that the same command goes on where the last one was stopped:

  rows (question, sample) -> episodes, in batches -> lines of a file -> estimates -> tables
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from typing import Any

from absl import logging

from stppo_jax import components
from stppo_jax import config as schema
from stppo_jax import types
from stppo_jax import validation
from stppo_jax.distributed import hosts
from stppo_jax.evaluation import estimates
from stppo_jax.evaluation import player as player_lib
from stppo_jax.evaluation import policy as results_lib
from stppo_jax.evaluation import records
from stppo_jax.evaluation import remote
from stppo_jax.evaluation import scores as evaluation
from stppo_jax.evaluation import table

_TELL_S = 10.0  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class Results:
  """The results of an evaluation."""

  folder: str
  scores: Mapping[str, float]  # under the names of metrics.jsonl
  groups: Sequence[estimates.Group]
  table: str


def evaluate(
    config: schema.Config, workdir: str, stop_requested: Callable[[], bool] = lambda: False
) -> Results | None:
  """Plays what is left of the evaluation, and returns its results on the process that writes.

  None: `stop_requested()` has turned true, and the same command goes on; or another process writes.
  """
  validation.validate(config)
  hosts.require_same('config', dataclasses.asdict(config))
  player: player_lib.Player
  if config.eval.address:
    player = remote.Remote(config, stop_requested)
  else:
    player = player_lib.Trained(config, workdir, stop_requested)
  _check_ids(player.tasks)
  rows = player_lib.rows_of(player.tasks, config.eval.samples)
  settings = _settings(config, player)
  path = config.eval.folder or os.path.join(workdir, 'eval', _name(config, player, settings))
  with contextlib.ExitStack() as resources:
    folder = records.Folder(path, settings, player.tasks)
    hosts.by_writer(lambda: resources.enter_context(folder).path)
    try:
      _play(player, rows, folder)
    except types.Stopped:
      logging.info('stopped on request; the same command goes on with %s', path)
      return None
    return _results(config, player, folder) if hosts.is_writer() else None


def _check_ids(tasks: Sequence[types.Task]) -> None:
  """Refuses questions of one id, whose lines could not be told apart."""
  count = collections.Counter(task.id for task in tasks)
  if again := next((name for name, times in count.items() if times > 1), None):
    raise types.UserError(
        f'{count[again]} of the held-out questions have the id {again!r}: give each task an id of '
        'its own'
    )


def _play(player: player_lib.Player, rows: list[records.Row], folder: records.Folder) -> None:
  """Plays the rows without a line, and adds their lines.

  A batch that has to be played as a whole is: then its rows have the same neighbours, and so the
  same numbers, as in a job that was not stopped.
  """
  done = {tuple(key) for key in hosts.by_writer(lambda: list(folder.episodes()))}
  of_all = len(rows) * len(player.roles)

  def is_done(row):
    return all((*row.key, role) in done for role in player.roles)

  if done:
    logging.info('%d of %d episodes were played before, in %s', len(done), of_all, folder.path)
  if player.batch:
    batches = [rows[i : i + player.batch] for i in range(0, len(rows), player.batch)]
  else:
    batches = [[row for row in rows if not is_done(row)]]
  last = time.monotonic()
  for batch in batches:
    if all(map(is_done, batch)):
      continue
    for played in player.play(batch):
      if hosts.is_writer() and played.key not in done:
        folder.add(played)
      done.add(played.key)
      if time.monotonic() - last > _TELL_S or len(done) == of_all:
        last = time.monotonic()
        logging.info('%d of %d episodes', len(done), of_all)


def _results(config, player: player_lib.Player, folder: records.Folder) -> Results:
  """Computes and writes the results of all lines."""
  episodes, groups = folder.episodes(), []
  for role in player.roles:
    numbers = range(config.eval.samples)
    played = {task.id: [episodes[task.id, i, role] for i in numbers] for task in player.tasks}
    present = {name: [x for x in found if not x.absent] for name, found in played.items()}
    if samples := {name: found for name, found in present.items() if found}:
      of_role = estimates.groups(samples)
      prefix = f'{role}: ' if role else ''
      groups += [dataclasses.replace(group, name=prefix + group.name) for group in of_role]
  rows = player_lib.rows_of(player.tasks, config.eval.samples)
  scores = evaluation.scores([episodes[*row.key, role] for row in rows for role in player.roles])
  title = f'{config.data.eval_split}, {_how(config)}: {player.said}'
  written = table.text(title, groups, _remarks(scores))
  as_json = {
      'title': title,
      'samples': config.eval.samples,
      'scores': scores,
      'groups': [dataclasses.asdict(group) for group in groups],
  }
  folder.write_results(as_json, written)
  return Results(folder.path, scores, groups, written)


def _remarks(scores: Mapping[str, float]) -> str:
  """Returns a line on the course of the episodes."""
  shares = {
      'ended by a limit': 'truncated',
      'without retrieval': 'retrieval_failed',
      'whose environment raised': 'environment_failed',
      'with a prompt that is too long': 'prompt_too_long',
  }
  seen = [f'{scores[f"val-aux/{name}"]:.1%} {said}' for said, name in shares.items()]
  return f'{scores["val-aux/agent_turns/mean"]:.2f} turns per episode; {", ".join(seen)}.'


def _settings(config, player: player_lib.Player) -> dict[str, Any]:
  """Returns what the episodes depend on. Choice: not the corpus, which a server may have."""
  settings = {
      path: value
      for path, rules, value in validation.fields(config)
      if path.split('.')[0] in results_lib.SCORED_BY and not rules.resume_safe
  }
  questions = json.dumps([dataclasses.asdict(task) for task in player.tasks])
  return {
      'seed': config.seed,
      'samples': config.eval.samples,
      'temperature': player_lib.temperature(config),
      'player': dict(player.identity),
      'questions': hashlib.sha256(questions.encode()).hexdigest()[:16],
      'sources': components.plugin_digests(config),
      'settings': settings,
  }


def _name(config, player: player_lib.Player, settings) -> str:
  """Returns the name of the folder of an evaluation with these settings."""
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
  how = 'greedy' if player_lib.temperature(config) == 0 else f't{player_lib.temperature(config):g}'
  if config.eval.samples > 1:
    how = f'{config.eval.samples}_{how}'
  return re.sub(r'[^\w.-]+', '-', f'{config.data.eval_split}_{player.label}_{how}_{digest}')


def _how(config) -> str:
  hot = player_lib.temperature(config)
  how = 'greedy' if hot == 0 else f'at temperature {hot:g}'
  return f'{config.eval.samples} samples {how}' if config.eval.samples > 1 else how
