"""Thresholds on the metrics of a run: lines of metrics in, alarms out.

Each rule watches one metric, averaged over the last `window` updates that have it. The rule is
broken if the mean is beyond the limit. config.HealthSettings holds the limits, which were set by
hand.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class HealthRule:
  """A watched metric."""

  metrics: tuple[str, ...]  # the first one that the run has
  meaning: str
  # 'above': the mean is above the limit. 'best', 'first': below (1 - limit) times the mean of the
  # best or first window.
  kind: str = 'above'


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A rule that is broken after the last update."""

  name: str  # the rule
  metric: str
  value: float
  bound: float  # the value is beyond the limit
  is_new: bool  # the rule was not broken one update earlier

  def line(self, window: int) -> str:
    """Returns one line for the log."""
    return (
        f'health: {RULES[self.name].meaning}: {self.metric} is {self.value:.4g} over the last '
        f'{window} updates, beyond {self.bound:.4g} (config.health.{self.name}); look at the '
        'episodes with --mode=watch'
    )


def check(
    rows: Sequence[Mapping[str, float | None]], limits: Mapping[str, float], window: int
) -> list[Alarm]:
  """Returns the rules that the run breaks after the last of `rows`, the metrics of all updates.

  A limit of 0 turns its rule off. A rule is not broken before its metric fills a window.
  """
  alarms = []
  for name, rule in RULES.items():
    limit = limits[name]
    metric = next((metric for metric in rule.metrics if metric in rows[-1]), '')
    if not limit or not _has(rows[-1], metric):
      continue
    series = np.array([row[metric] for row in rows if _has(row, metric)], np.float64)
    if len(series) < window:
      continue
    means = np.convolve(series, np.full(window, 1 / window), 'valid')
    if rule.kind == 'above':
      bounds = np.full(len(means), limit)
      broken = means > bounds
    else:
      references = np.full(len(means), means[0])
      if rule.kind == 'best':
        references = np.maximum.accumulate(means)
      bounds = (1 - limit) * references
      broken = (means < bounds) & (references > 0)
    if broken[-1]:
      is_new = len(broken) == 1 or not broken[-2]
      alarms.append(Alarm(name, metric, float(means[-1]), float(bounds[-1]), is_new))
  return alarms


def watched_metrics(row: Mapping[str, float]) -> dict[str, float]:
  """Returns the part of a line of metrics that `check` needs, to keep in memory."""
  return {name: row[name] for rule in RULES.values() for name in rule.metrics if name in row}


def flags(alarms: Sequence[Alarm]) -> dict[str, float]:
  """Returns health/<rule>, 1 if the rule is broken, for metrics.jsonl and the report."""
  broken = {alarm.name for alarm in alarms}
  return {f'health/{name}': float(name in broken) for name in RULES}


def _has(row: Mapping[str, float | None], metric: str) -> bool:
  value = row.get(metric)
  return value is not None and math.isfinite(value)


RULES = {
    'score_drop': HealthRule(('critic/score/mean',), 'the score has collapsed', kind='best'),
    'entropy_drop': HealthRule(('actor/entropy',), 'the policy has lost its entropy', kind='first'),
    'kl': HealthRule(
        ('stppo/ref_kl', 'actor/reward_kl_penalty'), 'the policy is far from its reference'
    ),
    'ppo_kl': HealthRule(('actor/ppo_kl',), 'updates move the policy too far'),
    'sampler_gap': HealthRule(
        ('rollout_corr/k3_kl',), 'sampler and trainer disagree about log-probs'
    ),
    'invalid': HealthRule(('env/invalid_share',), 'many turns hold no valid action'),
    'repeated': HealthRule(('env/repeated_share',), 'turns repeat earlier ones'),
    'empty': HealthRule(('env/empty_share',), 'turns are empty'),
    'cut': HealthRule(('env/cut_share',), 'turns run into rollout.max_turn'),
    'truncated': HealthRule(('env/truncated',), 'episodes end at a limit, without an answer'),
    'retrieval_failed': HealthRule(('env/retrieval_failed',), 'searches fail'),
    'prompt_too_long': HealthRule(
        ('env/prompt_too_long',), 'prompts are longer than rollout.max_prompt and are not played'
    ),
}
