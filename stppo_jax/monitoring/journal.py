"""The journal of a run: everything that the run writes about itself, and where.

Metrics, episodes and alarms in; metrics.jsonl, episodes/*.jsonl, the log, and at the end
report.html out. Only process 0 writes.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import time
from typing import Any

from absl import logging

from stppo_jax import types
from stppo_jax.distributed import hosts
from stppo_jax.monitoring import episodes as episodes_lib
from stppo_jax.monitoring import health as health_lib
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.monitoring import report
from stppo_jax.monitoring import workdir as workdir_lib
from stppo_jax.rollout import batches
from stppo_jax.text import tokenizer as tokenizer_lib


class Journal(contextlib.ExitStack):
  """The writer of a run's records in `workdir`, from update `first` on. A context manager.

  Args:
    workdir: the folder of the run.
    config: the run's Config as nested dicts; the journal reads `name`, `log`, `health` and
      `train.updates`.
    first: updates done before; the journal drops the lines of later ones.
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
      is_rollback: bool = False,
  ):
    super().__init__()
    self._workdir = workdir
    self._first = first
    self._timed_from = config['train']['updates']  # the time left is estimated from later updates
    self._has_timed = False
    self._updates = config['train']['updates']
    self._log = config['log']
    self._health = config['health']
    self._core_metrics = core_metrics
    main = core_metrics[0] if core_metrics else 'score'
    self._main = f'val-core/all/{main}'
    self._writer: metrics_lib.MetricsWriter | None = None
    self._recorder: episodes_lib.Recorder | None = None
    if hosts.is_writer():
      workdir_lib.record_main_score(workdir, main)
      self._recorder = self.enter_context(episodes_lib.Recorder(workdir))
      last_line = first - 1 if unfinished else first
      writer = metrics_lib.MetricsWriter(
          workdir,
          tensorboard=self._log['tensorboard'],
          project=self._log['project'],
          tracker=self._log['tracker'],
          run_name=config['name'],
          config_json=json.dumps(config),
          resume_step=last_line if first else -1,
          is_rollback=is_rollback,
      )
      self._writer = self.enter_context(writer)
    rows = hosts.by_writer(metrics_lib.read_metrics, workdir)
    self._history = [health_lib.watched_metrics(row) for row in rows]
    self._started = time.perf_counter()

  def main_score(self, scores: Mapping[str, float]) -> float:
    """Returns the main score of an evaluation."""
    return scores[self._main]

  def log_evaluation(
      self,
      n: int,
      scores: Mapping[str, float],
      episodes: Sequence[types.Episode],
      tokenizer: tokenizer_lib.Tokenizer,
  ) -> None:
    """Logs the held-out scores after n updates, and writes the episodes."""
    line = f'{self._main.split("/")[-1]} {scores[self._main]:.3f}'
    by_hops = [name for name in scores if f'{self._main}_hops' in name]
    if by_hops:
      # The names end in hops1, hops2, ..
      by_hops_texts = [f'{name[-5:]} {scores[name]:.3f}' for name in by_hops]
      line += f'  ({"  ".join(by_hops_texts)})'
    logging.info('held out after %d updates: %s', n, line)
    if failed := batches.failed_share(episodes):
      logging.warning(
          'retrieval failed in %.0f%% of the held-out episodes: they count with the score that '
          'they got without it',
          100 * failed,
      )
    if errors := [episode.error for episode in episodes if episode.error]:
      logging.warning(
          'the environment raised in %d of %d held-out episodes, whose rewards end there. The '
          'first error: %s',
          len(errors),
          len(episodes),
          errors[0],
      )
    self.record('eval', n, lambda: episodes_lib.to_records(episodes, tokenizer, n, 'eval'))

  def write(self, n: int, metrics: Mapping[str, float]) -> None:
    """Writes a line of metrics; with held-out scores, also the report so far."""
    if self._writer is None:
      return
    self._writer.write(n, metrics)
    if any(name.startswith('val-core/') for name in metrics):
      self._report()

  def record(self, kind: str, n: int, records: episodes_lib.Records) -> None:
    """Writes episodes in the background: kind 'eval', or 'train' of each `episodes_every`-th."""
    is_due = kind == 'eval' or n % self._log['episodes_every'] == 0
    if self._recorder is not None and self._log['episodes'] and is_due:
      self._recorder.put(kind, n, records)

  def log_update(self, n: int, metrics: Mapping[str, float]) -> list[health_lib.Alarm]:
    """Writes the numbers and a line of progress of update n; returns the health alarms."""
    self._history.append(health_lib.watched_metrics(metrics))
    alarms = health_lib.check(self._history, self._health, self._health['window'])
    self.write(n, {**metrics, **health_lib.flags(alarms)})
    elapsed_s = time.perf_counter() - self._started
    line = metrics_lib.progress_line(
        n, self._updates, metrics, elapsed_s, self._timed_from, self._core_metrics
    )
    logging.info(line)
    if not self._has_timed:  # the first update compiles, and says nothing about the others
      self._has_timed = True
      self._timed_from = n
      self._started = time.perf_counter()
    return alarms

  def warn(self, n: int, alarms: Sequence[health_lib.Alarm]) -> None:
    """Logs new alarms; raises a RunError for a rule of config.health.stop_on."""
    for alarm in alarms:
      if not alarm.is_new:
        continue
      message = alarm.line(self._health['window'])
      if alarm.name in self._health['stop_on']:
        raise types.RunError(
            f'update {n}: {message}; config.health.stop_on says to stop, and the same command '
            'trains on until a limit is broken again'
        )
      logging.warning(message)

  def dump(self, n: int, records: episodes_lib.Records) -> str:
    """Writes the episodes of an update whose steps were skipped; returns their path."""
    path = episodes_lib.record_path(self._workdir, 'nonfinite', n)
    if hosts.is_writer():
      episodes_lib.write_lines(path, records())
    return path

  def log_end(self, n: int) -> None:
    """Logs how the run ended after update n; builds the report."""
    if n < self._updates:
      logging.info(
          'stopped on request, %d of %d updates done and saved; the same command resumes',
          n,
          self._updates,
      )
    elif n == self._first > 0:
      logging.info(
          'all %d updates of this run are done: --config.train.updates=N trains on, where the '
          'learning rates have no schedule, and --mode=eval gives scores with intervals',
          n,
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
