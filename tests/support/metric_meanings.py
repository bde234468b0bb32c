"""Looks up a name of a metric in the table that documents the metrics."""

import re

from stppo_jax.monitoring import metric_names


def meaning(name: str) -> str:
  """Returns the meaning of a metric; '' if the table does not have it.

  Of several names with placeholders, the one with the longest fixed text counts.
  """
  table = {
      pattern: text for metrics in metric_names.GROUPS.values() for pattern, text in metrics.items()
  }
  matches = [pattern for pattern in table if re.fullmatch(_regex(pattern), name)]
  if not matches:
    return ''
  return table[max(matches, key=lambda pattern: len(re.sub(r'<\w+>', '', pattern)))]


def _regex(pattern: str) -> str:
  """Returns the regular expression of a name with placeholders."""
  expression = re.sub(r'<\w+>', '[^/]+', pattern)
  return re.sub(r'\{(.*?)\}', lambda match: f'(?:{match[1].replace(",", "|")})', expression)
