"""Thresholds on the metrics of a run: lines of metrics in, alarms out.

Each rule watches one metric, averaged over the last `window` updates that have it. The rule is
broken if the mean is beyond the limit. config.HealthSettings holds the limits, which were set by
hand.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

EpisodeRecord = Mapping[str, Any]  # a line of episodes/*.jsonl


@dataclasses.dataclass(frozen=True)
class HealthRule:
  """A watched metric, and how far the record of an episode breaks the rule (0: not at all)."""

  metrics: tuple[str, ...]  # the first one that the run has
  meaning: str
  badness: Callable[[EpisodeRecord], float]
  # 'above': the mean is above the limit. 'best', 'first': below (1 - limit) times the mean of the
  # best or first window.
  kind: str = 'above'


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A rule that is broken after the last update."""

  name: str  # the rule
  metric: str
  value: float
  bound: float  # the value is beyond it
  is_new: bool  # the rule was not broken an update before

  def line(self, window: int, place: str) -> str:
    """Returns one line for the log."""
    return (
        f'health: {RULES[self.name].meaning}: {self.metric} is {self.value:.4g} over the last '
        f'{window} updates, beyond {self.bound:.4g} (config.health.{self.name}); look at {place}'
    )


def check(
    rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float], window: int
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


def worst_lines(name: str, records: Sequence[EpisodeRecord], number: int = 3) -> list[int]:
  """Returns the line numbers, from 1, of the episodes in a file that break the rule most."""
  badness = [RULES[name].badness(record) for record in records]
  order = sorted(range(len(records)), key=lambda i: -badness[i])
  return sorted(i + 1 for i in order[:number] if badness[i] > 0)


def _has(row: Mapping[str, Any], metric: str) -> bool:
  value = row.get(metric)
  return value is not None and math.isfinite(value)


def _turns(record: EpisodeRecord, field: str) -> list[list]:
  """Returns the values of a field of each turn of the agent: `tokens` or their texts, `pieces`."""
  turns: list[list] = [[] for _ in record['actions']]
  for value, turn in zip(record[field], record['turn_ids']):
    if turn:
      turns[turn - 1].append(value)
  return turns


def _repeats(record: EpisodeRecord) -> int:
  turns = [tuple(turn) for turn in _turns(record, 'tokens')]
  return len(turns) - len(set(turns))


def _blank_turns(record: EpisodeRecord) -> int:
  texts = [''.join(turn) for turn in _turns(record, 'pieces')]
  return sum(not text.strip() or (text.startswith('<|') and text.endswith('|>')) for text in texts)


def _longest_turn(record: EpisodeRecord) -> int:
  return max(map(len, _turns(record, 'tokens')), default=0)


def _sampler_gap(record: EpisodeRecord) -> float:
  pairs = zip(record.get('old_logp', ()), record['behaviour_logp'])
  # An infinite log-prob is a text, see `Episode.to_dict`.
  gaps = [abs(old - float(new)) for old, new in pairs if old is not None and new is not None]
  return max(gaps, default=0.0)


def _certainty(record: EpisodeRecord) -> float:
  """Returns the geometric mean of the sampled tokens' probabilities: 1 if all were certain."""
  logp = [float(x) for x in record['behaviour_logp'] if x is not None]
  return float(np.exp(np.mean(logp))) if logp else 0.0


def _failed_search(record: EpisodeRecord) -> float:
  return float(record['failed'] and bool(record['actions']))  # without turns its prompt is too long


def _ratio_change(record: EpisodeRecord) -> float:
  return max((abs(x - 1) for x in record.get('ratio', ()) if x is not None), default=0.0)


RULES = {
    'score_drop': HealthRule(
        ('critic/score/mean',),
        'the score has collapsed',
        lambda record: 1.0 - (record['score'] or 0.0),
        kind='best',
    ),
    'entropy_drop': HealthRule(
        ('actor/entropy',), 'the policy has lost its entropy', _certainty, kind='first'
    ),
    'kl': HealthRule(
        ('stppo/ref_kl', 'actor/reward_kl_penalty'),
        'the policy is far from its reference',
        _certainty,
    ),
    'ppo_kl': HealthRule(('actor/ppo_kl',), 'updates move the policy too far', _ratio_change),
    'sampler_gap': HealthRule(
        ('rollout_corr/k3_kl',), 'sampler and trainer disagree about log-probs', _sampler_gap
    ),
    'invalid': HealthRule(
        ('env/invalid_share',),
        'many turns hold no valid action',
        lambda record: record['actions'].count('invalid'),
    ),
    'repeated': HealthRule(('env/repeated_share',), 'turns repeat earlier ones', _repeats),
    'empty': HealthRule(('env/empty_share',), 'turns are empty', _blank_turns),
    'cut': HealthRule(('env/cut_share',), 'turns run into rollout.max_turn', _longest_turn),
    'truncated': HealthRule(
        ('env/truncated',),
        'episodes end at a limit, without an answer',
        lambda record: float(record['truncated']),
    ),
    'retrieval_failed': HealthRule(('env/retrieval_failed',), 'searches fail', _failed_search),
    'prompt_too_long': HealthRule(
        ('env/prompt_too_long',),
        'prompts are longer than rollout.max_prompt and are not played',
        lambda record: float(not record['actions']),
    ),
}
