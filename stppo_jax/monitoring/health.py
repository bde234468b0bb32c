"""Thresholds on the metrics of a run: lines of metrics in, alarms out.

Each rule watches one metric, averaged over the last `window` updates that have it, and is broken
when that mean is beyond the limit. config.Health holds the limits, which were set by hand.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
  """A watched metric, and how far an episode's record breaks the rule (0: not at all)."""

  metrics: tuple[str, ...]  # the first of them that the run has
  kind: str  # 'above' limit | below (1 - limit) times the 'best' window | .. the 'first' window
  meaning: str
  badness: Callable[[Mapping[str, Any]], float]


@dataclasses.dataclass(frozen=True)
class Alarm:
  """A rule that is broken after the last update."""

  name: str  # of the rule
  metric: str
  value: float
  bound: float  # what the value is beyond
  is_new: bool  # it was not broken an update before

  def line(self, window: int, place: str) -> str:
    """Returns one line for the log."""
    return (
        f'health: {RULES[self.name].meaning}: {self.metric} is {self.value:.4g} over the last '
        f'{window} updates, beyond {self.bound:.4g} (config.health.{self.name}); look at {place}'
    )


def check(
    rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float], window: int
) -> list[Alarm]:
  """Returns the rules that the run breaks after the last of `rows`, the metrics of all its updates.

  A limit of 0 turns its rule off. A rule is not broken before its metric fills a window.
  """
  alarms = []
  for name, rule in RULES.items():
    if not limits[name]:
      continue
    metric = next((m for m in rule.metrics if m in rows[-1]), '')
    series = np.array([row[metric] for row in rows if _has(row, metric)], np.float64)
    if len(series) < window or not _has(rows[-1], metric):
      continue
    means = np.convolve(series, np.full(window, 1 / window), 'valid')
    if rule.kind == 'above':
      bounds = np.full(len(means), limits[name])
      broken = means > bounds
    else:
      peaks = np.maximum.accumulate(means) if rule.kind == 'best' else np.full(len(means), means[0])
      bounds = (1 - limits[name]) * peaks
      broken = (means < bounds) & (peaks > 0)
    if broken[-1]:
      is_new = len(broken) == 1 or not broken[-2]
      alarms.append(Alarm(name, metric, float(means[-1]), float(bounds[-1]), is_new))
  return alarms


def watched(row: Mapping[str, float]) -> dict[str, float]:
  """Returns the part of a line of metrics that `check` needs, to keep in memory."""
  return {name: row[name] for rule in RULES.values() for name in rule.metrics if name in row}


def flags(alarms: Sequence[Alarm]) -> dict[str, float]:
  """Returns health/<rule>, 1 where it is broken, for metrics.jsonl and the report."""
  broken = {alarm.name for alarm in alarms}
  return {f'health/{name}': float(name in broken) for name in RULES}


def worst_lines(name: str, records: Sequence[Mapping[str, Any]], most: int = 3) -> list[int]:
  """Returns the line numbers, from 1, of the episodes in a file that break the rule most."""
  badness = [RULES[name].badness(record) for record in records]
  order = sorted(range(len(records)), key=lambda i: -badness[i])[:most]
  return sorted(i + 1 for i in order if badness[i] > 0)


def _has(row, metric):
  value = row.get(metric)
  return value is not None and math.isfinite(value)


def _turns(record):
  """Returns the tokens of each turn of the agent."""
  turns = [[] for _ in record['actions']]
  for token, turn in zip(record['tokens'], record['turn_ids']):
    if turn:
      turns[turn - 1].append(token)
  return turns


def _repeats(record):
  turns = [tuple(turn) for turn in _turns(record)]
  return len(turns) - len(set(turns))


def _blank_turns(record):
  texts = ['' for _ in record['actions']]
  for piece, turn in zip(record['pieces'], record['turn_ids']):
    if turn:
      texts[turn - 1] += piece
  return sum(not text.strip() or (text.startswith('<|') and text.endswith('|>')) for text in texts)


def _gap(record):
  pairs = zip(record.get('old_logp', ()), record['behaviour_logp'])
  return max(
      (abs(old - sampled) for old, sampled in pairs if old is not None and sampled is not None),
      default=0.0,
  )


def _surprise(record):
  """Returns the geometric mean of the sampled tokens' probabilities: 1 where all were certain."""
  logp = [x for x in record['behaviour_logp'] if x is not None]
  return float(np.exp(np.mean(logp))) if logp else 0.0


def _unanswered(record):
  return float(record['failed'] and bool(record['actions']))  # else its prompt was too long


def _ratio(record):
  return max((abs(x - 1) for x in record.get('ratio', ()) if x is not None), default=0.0)


RULES = {
    'score_drop': Rule(
        ('critic/score/mean',),
        'best',
        'the score has collapsed',
        lambda record: 1.0 - (record['score'] or 0.0),
    ),
    'entropy_drop': Rule(('actor/entropy',), 'first', 'the policy has lost its entropy', _surprise),
    'kl': Rule(
        ('stppo/ref_kl', 'actor/reward_kl_penalty'),
        'above',
        'the policy is far from its reference',
        _surprise,
    ),
    'ppo_kl': Rule(('actor/ppo_kl',), 'above', 'updates move the policy too far', _ratio),
    'sampler_gap': Rule(
        ('rollout_corr/k3_kl',), 'above', 'sampler and trainer disagree about log-probs', _gap
    ),
    'invalid': Rule(
        ('env/invalid_share',),
        'above',
        'many turns hold no valid action',
        lambda record: record['actions'].count('invalid'),
    ),
    'repeated': Rule(('env/repeated_share',), 'above', 'turns repeat earlier ones', _repeats),
    'empty': Rule(('env/empty_share',), 'above', 'turns are empty', _blank_turns),
    'cut': Rule(
        ('env/cut_share',),
        'above',
        'turns run into rollout.max_turn',
        lambda record: max(map(len, _turns(record)), default=0),
    ),
    'truncated': Rule(
        ('env/truncated',),
        'above',
        'episodes end at a limit, without an answer',
        lambda record: float(record['truncated']),
    ),
    'retrieval_failed': Rule(('env/retrieval_failed',), 'above', 'searches fail', _unanswered),
    'prompt_too_long': Rule(
        ('env/prompt_too_long',),
        'above',
        'prompts are longer than rollout.max_prompt and are not played',
        lambda record: float(not record['actions']),
    ),
}
