"""How episodes ended: one table for updates, evaluations and the report."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.rollout import batching

# Outcome -> meaning. If several apply, the last one is used.
MEANINGS = {
    'answered': 'It ended by itself.',
    'truncated': 'It ended at a limit of turns, length or time.',
    'skipped': 'It ended, but no optimizer step used it, because the gradients were not finite.',
    'prompt_too_long': 'It was not played, because of the length of its prompt.',
    'retrieval_failed': 'A search or a remote environment failed.',
    'program_failed': 'The agent program raised an error, or called no model.',
    'environment_failed': "The environment's code raised an error.",
}


def count(episodes: Sequence[types.Episode], skipped: Collection[int] = ()) -> dict[str, int]:
  """Returns {outcome: number of sampled episodes}, with all outcomes.

  Args:
    episodes: rows. Several rows may belong to one episode.
    skipped: numbers of the rows that were used only in skipped optimizer steps.
  """
  counts = dict.fromkeys(MEANINGS, 0)
  for rows in batching.rows_by_episode(episodes):
    if episodes[rows[0]].demonstrated:
      continue
    outcomes = [_outcome(episodes[row], row in skipped) for row in rows]
    counts[max(outcomes, key=list(MEANINGS).index)] += 1
  return counts


def skipped_rows(rows: Sequence[Sequence[int]], is_skipped: Sequence[object]) -> set[int]:
  """Returns the rows of which every optimizer step was skipped, from the rows of each step."""
  skipped_steps = [step for step, skipped in zip(rows, is_skipped) if skipped]
  other_steps = [step for step, skipped in zip(rows, is_skipped) if not skipped]
  return set(np.ravel(skipped_steps).tolist()) - set(np.ravel(other_steps).tolist())


def count_update(
    parts: Sequence[tuple[Sequence[types.Episode], Sequence[types.StepMetrics]]],
) -> dict[str, int]:
  """Returns the counts of an update, from the rows and the optimizer steps of each policy."""
  all_rows: list[types.Episode] = []
  skipped: set[int] = set()
  for rows, steps in parts:
    is_skipped = [step.metrics['actor/skipped'] > 0 for step in steps]
    numbers = skipped_rows([step.rows for step in steps], is_skipped)
    skipped |= {len(all_rows) + number for number in numbers}
    all_rows += rows
  return count(all_rows, skipped)


def as_metrics(prefix: str, counts: Mapping[str, int]) -> dict[str, int]:
  """Returns {prefix/outcome: number}, as metrics.jsonl holds it."""
  return {f'{prefix}/{name}': number for name, number in counts.items()}


def from_metrics(prefix: str, *rows: Mapping[str, Any]) -> dict[str, int]:
  """Returns {outcome: number} over lines of metrics.jsonl; {} if none has them."""
  lines = [row for row in rows if f'{prefix}/answered' in row]
  if not lines:
    return {}
  return {name: sum(line.get(f'{prefix}/{name}', 0) for line in lines) for name in MEANINGS}


def count_run(rows: Sequence[Mapping[str, object]]) -> dict[str, dict[str, int]]:
  """Returns the counts of all updates, and of the last evaluation, from lines of metrics.jsonl."""
  evaluations = [row for row in rows if 'val-outcome/answered' in row]
  tables = {
      'training': from_metrics('outcome', *rows),
      'last evaluation': from_metrics('val-outcome', *evaluations[-1:]),
  }
  return {name: counts for name, counts in tables.items() if counts}


def _outcome(row: types.Episode, is_skipped: bool) -> str:
  if row.error:
    return 'environment_failed'
  if row.counts.get('program_failed') or row.counts.get('crashed'):
    return 'program_failed'
  if row.counts.get('prompt_too_long'):
    return 'prompt_too_long'
  if row.failed:
    return 'retrieval_failed'
  if is_skipped:
    return 'skipped'
  return 'truncated' if row.truncated else 'answered'
