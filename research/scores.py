"""Writes the scores of docs/systems.md and docs/examples.md from the committed records.

  python -m research.scores

The text of a page is a template of research/score_templates, with a placeholder for each result:

  {{ example('screens') }}             the first curve of examples/screens/curve.csv, then the seeds
                                       of research/results/examples.jsonl
  {{ example('screens', 'outcome') }}  this curve of the file
  {{ row('tdpo') }}                    the seeds of research/results/rows.jsonl
  {{ default_run('st_ppo') }}          the seeds of research/results/default_run.jsonl

A result reads `before → after, after`, with a score after the arrow for each seed.
"""

import csv
import functools
import pathlib

import jinja2

from research import plot_default_run
from research import study_rows
from research.study import results

ROOT = pathlib.Path(__file__).parent.parent
TEMPLATES = ROOT / 'research' / 'score_templates'
DOCS = ROOT / 'docs'


def main() -> None:
  """Writes the pages."""
  for name, text in make_pages().items():
    (DOCS / name).write_text(text, encoding='utf-8')


def make_pages() -> dict[str, str]:
  """Returns {name of the page: text}."""
  environment = jinja2.Environment(
      undefined=jinja2.StrictUndefined,
      trim_blocks=True,
      lstrip_blocks=True,
      keep_trailing_newline=True,
      autoescape=False,
  )
  environment.globals.update(row=row, default_run=default_run, example=example)
  paths = sorted(TEMPLATES.glob('*.md'))
  return {
      path.name: environment.from_string(path.read_text(encoding='utf-8')).render()
      for path in paths
  }


def row(name: str) -> str:
  """Returns the scores of a row of research/study_rows.py."""
  return show(recorded_seeds(study_rows.ROWS, name))


def default_run(rule: str) -> str:
  """Returns the scores of a rule in the default run."""
  records = plot_default_run.read(rule)
  return show({record['seeds'][0]: record['score']['values'] for record in records})


def example(folder: str, label: str = '') -> str:
  """Returns the scores of an example: its first curve with the recorded seeds, or one curve."""
  if label:
    return show(curve_seeds(folder)[label])
  own = next(iter(curve_seeds(folder).values()), {})
  return show(own | recorded_seeds(study_rows.EXAMPLES, folder))


def show(scores: dict[int, list[float]]) -> str:
  """Returns `before → after, after` for {seed: its scores}; an error without a seed."""
  if not scores:
    raise ValueError('no record')
  runs = [scores[seed] for seed in sorted(scores)]
  before = {two_digits(run[0]) for run in runs}
  if len(before) > 1:
    raise ValueError(f'the seeds begin with different scores: {sorted(before)}')
  return f'{before.pop()} → {", ".join(two_digits(run[-1]) for run in runs)}'


def two_digits(value: float) -> str:
  """Returns .53 or 1.77."""
  return f'{value:.2f}'.removeprefix('0')


def curve_seeds(folder: str) -> dict[str, dict[int, list[float]]]:
  """Returns {label: {seed: held-out scores}} of the curves of an example, {} without a file."""
  path = ROOT / 'examples' / folder / 'curve.csv'
  curves: dict[str, dict[int, list[float]]] = {}
  if not path.exists():
    return curves
  with path.open(encoding='utf-8', newline='') as file:
    for label, seed, _, _, held_out in list(csv.reader(file))[1:]:
      if held_out:
        curves.setdefault(label, {}).setdefault(int(seed), []).append(float(held_out))
  return curves


def recorded_seeds(grid_name: str, method: str) -> dict[int, list[float]]:
  """Returns {seed: held-out scores} of a method. The newest record of a seed counts."""
  seeds = {}
  for record in _records():
    if record['grid'] == grid_name and record['method'] == method:
      seeds[record['seeds'][0]] = record['score']['values']
  return seeds


@functools.cache
def _records() -> list[dict]:
  return results.read(study_rows.RESULTS)


if __name__ == '__main__':
  main()
