"""How episodes ended: one table for updates, evaluations and the report."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from stppo_jax import types
from stppo_jax.rollout import batching

# Outcome -> meaning. If several apply, the last one counts.
MEANINGS = {
    'answered': 'It ended by itself.',
    'truncated': 'It ended at a limit of turns, length or time.',
    'prompt_too_long': 'It was not played, because of the length of its prompt.',
    'retrieval_failed': 'A search or a remote environment failed.',
    'program_failed': 'The agent program raised an error, or called no model.',
    'environment_failed': "The environment's code raised an error.",
}


def count(episodes: Sequence[types.Episode]) -> dict[str, int]:
  """Returns {outcome: number of sampled episodes}, with all outcomes.

  Several rows may belong to one episode.
  """
  names = list(MEANINGS)
  counts = dict.fromkeys(names, 0)
  for numbers in batching.rows_by_episode(episodes):
    rows = [episodes[number] for number in numbers]
    if not rows[0].demonstrated:
      counts[max(map(_outcome, rows), key=names.index)] += 1
  return counts


def as_metrics(prefix: str, counts: Mapping[str, int]) -> dict[str, int]:
  """Returns {prefix/outcome: number}, as metrics.jsonl holds it."""
  return {f'{prefix}/{name}': number for name, number in counts.items()}


def from_metrics(prefix: str, *rows: Mapping[str, Any]) -> dict[str, int]:
  """Returns {outcome: number} over lines of metrics.jsonl; {} if none has them."""
  lines = [row for row in rows if f'{prefix}/answered' in row]
  if not lines:
    return {}
  return {name: sum(line.get(f'{prefix}/{name}', 0) for line in lines) for name in MEANINGS}


def of_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
  """Returns the counts of all updates, and of the last evaluation, from lines of metrics.jsonl."""
  evaluations = [row for row in rows if 'val-outcome/answered' in row]
  tables = {
      'training': from_metrics('outcome', *rows),
      'last evaluation': from_metrics('val-outcome', *evaluations[-1:]),
  }
  return {name: counts for name, counts in tables.items() if counts}


def _outcome(row):
  if row.error:
    return 'environment_failed'
  if row.counts.get('program_failed') or (row.is_segment and row.metrics.get('crashed')):
    return 'program_failed'
  if row.counts.get('prompt_too_long'):
    return 'prompt_too_long'
  if row.failed:
    return 'retrieval_failed'
  return 'truncated' if row.truncated else 'answered'
