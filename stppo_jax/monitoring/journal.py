"""The journal of a run: everything that it writes about itself, and where.

Metrics, episodes and alarms in; metrics.jsonl, episodes/*.jsonl, the log, and at the end
report.html out. Process 0 writes; the others only count.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import time
from typing import Any

from absl import logging
import numpy as np

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import health as health_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import report
from stppo_jax.rollout import pipeline

_FACTOR = 'stppo/applied_factor'
# NaN in a step without clipping, and where returns do not vary.
_MAY_BE_UNDEFINED = {'stppo/cos_g_c', 'critic/vf_explained_var'}


class Journal(contextlib.ExitStack):
  """What the run in `workdir` writes, from update `first` on; a context manager.

  Args:
    workdir: the folder of the run.
    config: the run's Config as nested dicts; `name`, `log`, `health` and `train.updates` are read.
    first: updates done before; lines of later ones are dropped.
    core_metrics: of the environment, the main one first.
    unfinished: whether the line of update `first` is still to be written.
  """

  def __init__(
      self,
      workdir: str,
      config: Mapping[str, Any],
      first: int,
      core_metrics: Sequence[str] = (),
      unfinished: bool = False,
  ):
    super().__init__()
    self._core_metrics = core_metrics
    self._main = f'val-core/all/{[*core_metrics, "score"][0]}'
    self._workdir, self._first, self._updates = workdir, first, config['train']['updates']
    self._log, self._health = config['log'], config['health']
    self._writer = self._recorder = None
    if hosts.is_writer():
      self._recorder = self.enter_context(episodes_lib.Recorder(workdir))
      self._writer = self.enter_context(
          metrics_lib.MetricsWriter(
              workdir,
              tensorboard=self._log['tensorboard'],
              wandb_project=self._log['wandb_project'] or None,
              run_name=config['name'],
              config_json=json.dumps(config),
              resume_step=first - unfinished if first else -1,
          )
      )
    rows = hosts.by_writer(metrics_lib.read_metrics, workdir)
    self._history = [health_lib.watched(row) for row in rows]
    self._started = time.perf_counter()

  def main_score(self, scores: Mapping[str, float]) -> float:
    """Returns the main one of an evaluation's scores."""
    return scores[self._main]

  def evaluated(
      self, n: int, scores: Mapping[str, float], episodes: Sequence[types.Episode], tokenizer: Any
  ) -> None:
    """Logs the held-out scores after n updates, and writes the episodes."""
    main = self._main
    hops = '  '.join(f'{name[-5:]} {scores[name]:.3f}' for name in scores if f'{main}_hops' in name)
    label, hops = main.split('/')[-1], f'  ({hops})' if hops else ''
    logging.info('held out after %d updates: %s %.3f%s', n, label, scores[main], hops)
    if failed := pipeline.failed_share(episodes):
      logging.warning(
          'retrieval failed in %.0f%% of the held-out episodes: they count as wrong', 100 * failed
      )
    if errors := [episode.error for episode in episodes if episode.error]:
      logging.warning(
          'the environment raised in %d of %d held-out episodes, whose rewards end there. The '
          'first error: %s',
          len(errors),
          len(episodes),
          errors[0],
      )
    make = lambda: episodes_lib.to_records(episodes, tokenizer, n, 'eval')
    self.record('eval', n, episodes_lib.Records(make))

  def write(self, n: int, metrics: Mapping[str, float]) -> None:
    """Writes a line of metrics; with held-out scores, also the report so far."""
    if self._writer is not None:
      self._writer.write(n, metrics)
      if any(name.startswith('val-core/') for name in metrics):
        self._report()

  def record(self, kind: str, n: int, records: episodes_lib.Records) -> None:
    """Writes episodes in the background: kind 'eval', or 'train' of each `episodes_every`-th."""
    log = self._log
    wanted = log['episodes'] and (kind == 'eval' or n % log['episodes_every'] == 0)
    if wanted and self._recorder is not None:
      self._recorder.put(kind, n, records)

  def updated(self, n: int, metrics: Mapping[str, float]) -> list[health_lib.Alarm]:
    """Writes the numbers and a line of progress of update n; returns the health alarms."""
    self._history.append(health_lib.watched(metrics))
    alarms = health_lib.check(self._history, self._health, self._health['window'])
    self.write(n, {**metrics, **health_lib.flags(alarms)})
    elapsed_s = time.perf_counter() - self._started
    line = metrics_lib.progress_line(
        n, self._updates, metrics, elapsed_s, self._first, self._core_metrics
    )
    logging.info(line)
    return alarms

  def warn(self, n: int, alarms: Sequence[health_lib.Alarm], records: episodes_lib.Records) -> None:
    """Logs new alarms; raises a RunError for a rule of config.health.stop_on."""
    for alarm in alarms:
      if not alarm.is_new:
        continue
      worst = health_lib.worst_lines(alarm.name, records.get()) if hosts.is_writer() else []
      lines = ', '.join(map(str, worst))
      place = f'line {lines} of episodes/train_{n:06d}.jsonl' if lines else "the run's charts"
      message = alarm.line(self._health['window'], place)
      if alarm.name in self._health['stop_on']:
        raise types.RunError(f'update {n}: {message}; config.health.stop_on says to stop')
      logging.warning(message)

  def dump(self, n: int, records: episodes_lib.Records) -> str:
    """Writes the episodes of an update whose steps were skipped; returns their path."""
    if hosts.is_writer():
      episodes_lib.write(self._workdir, 'nonfinite', n, records)
    return f'{self._workdir}/episodes/nonfinite_{n:06d}.jsonl'

  def finished(self, n: int) -> None:
    """Logs how the run ended after update n; builds the report."""
    if n < self._updates:
      logging.info(
          'stopped on request, %d of %d updates done and saved; the same command resumes',
          n,
          self._updates,
      )
    if path := self._report():
      logging.info('report: %s', path)

  def _report(self) -> str:
    """Writes report.html; returns its path. An error is a warning, since it can be repeated."""
    if not hosts.is_writer():
      return ''
    try:
      return report.build(self._workdir)
    except (OSError, types.UserError) as error:
      logging.warning('no report (%s): --mode=report writes it again', error)
      return ''


@dataclasses.dataclass(frozen=True)
class Seen:
  """The metrics and per-token numbers of one optimizer step."""

  rows: Any  # [b], of the batch: NumPy or jax
  metrics: Mapping[str, Any]
  tokens: Mapping[str, Any]  # ratio, clipped [b,T]


def summarize(episodes: Sequence[types.Episode], seen: Sequence[Seen]) -> dict[str, float]:
  """Summarises an update: means over its optimizer steps, and statistics of its episodes.

  The factor by which the division changed a step is also given as largest, smallest and per step
  (at most the first 8), since its mean hides a step that was lost.
  """
  metrics = means([step.metrics for step in seen])
  if _FACTOR in metrics:
    factors = [float(step.metrics[_FACTOR]) for step in seen]
    metrics |= {f'{_FACTOR}_max': max(factors), f'{_FACTOR}_min': min(factors)}
    metrics |= {f'{_FACTOR}_step{i}': factor for i, factor in enumerate(factors[:8], 1)}
  metrics['actor/skipped'] = max(int(step.metrics['actor/skipped']) for step in seen)  # in a row
  memory = {'perf/host_memory_gb': metrics_lib.host_memory_gb()}
  return metrics | episodes_lib.summarize(episodes) | memory | metrics_lib.device_memory()


def means(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Returns the mean of each metric; one that no part defines is left out."""
  found = {name: np.array([part[name] for part in parts], float) for name in parts[0]}
  for name in _MAY_BE_UNDEFINED & found.keys():
    found[name] = found[name][~np.isnan(found[name])]
  return {name: float(values.mean()) for name, values in found.items() if len(values)}


# Metrics of an update -> their names below role/<name>/, where one policy plays several roles, too.
_OF_ROLE = {
    'actor/pg_loss': 'pg_loss',
    'actor/pg_clipfrac': 'pg_clipfrac',
    'actor/ppo_kl': 'ppo_kl',
    'actor/entropy': 'entropy',
    'critic/vf_loss': 'vf_loss',
    'critic/vf_explained_var': 'vf_explained_var',
    'critic/advantages/mean': 'advantages/mean',
    'critic/returns/mean': 'returns/mean',
    'critic/values/mean': 'values/mean',
    'stppo/step_norm': 'step_norm',
    'stppo/grad_norm': 'grad_norm',
}


def of_role(role: str, metrics: Mapping[str, Any], seen: Sequence[Seen]) -> dict[str, float]:
  """Returns the metrics of an update of one role's own policy, under its name."""
  found = means([metrics]) | means([step.metrics for step in seen])
  return {f'role/{role}/{of}': float(found[name]) for name, of in _OF_ROLE.items() if name in found}


def records(
    sampled: pipeline.Sampled,
    tokenizer: Any,
    batch: types.TurnBatch,
    seen: Sequence[Seen],
    n: int,
    has_values: bool,
) -> episodes_lib.Records:
  """Returns the records of an update's episodes with per-token numbers of the last epoch."""
  tokens: dict[tuple[int, ...], Any] = {}
  for step in seen:
    tokens.pop(tuple(step.rows), None)  # a later epoch may have the same rows: its place is last
    tokens[tuple(step.rows)] = step.tokens
  return episodes_lib.with_tokens(sampled, tokenizer, batch, tokens, n, has_values)
