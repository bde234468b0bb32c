"""Draws the runs of SmolLM2-135M: a line per run of research/study_smollm2.py, a row per grid.

Prints the rows of the table of docs/models.md and the means over seeds, too.

python -m research.plot_smollm2 --out=docs/figures/smollm2.png
"""

import argparse

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from research import study_smollm2
from research.study import grid
from research.study import results

METHODS = {'st_ppo': ('ST-PPO', '#0072B2'), 'ppo': ('token PPO', '#D55E00')}
STYLES = {3e-4: '-', 1e-4: '--'}  # by rate
GRIDS = {
    study_smollm2.FIRST_DESIGN: 'batches two updates old, two steps',
    'smollm2_old_search': 'four updates old, four steps: search',
    'smollm2_old': 'four updates old, four steps: seeds',
    'smollm2_older_search': 'eight updates old, eight steps: search',
    'smollm2_older': 'eight updates old, eight steps: seeds',
}
WINDOW = 5  # updates that the mean of the reward covers
PANELS = {
    'train_score': f'reward, mean of {WINDOW} updates',
    'clip': 'clipped share of tokens',
    'bias_norm': 'norm of the clipping bias',
    'step': 'norm of an optimizer step',
    'entropy': 'entropy of the policy, nats',
}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--out', required=True)
  args = parser.parse_args()
  matplotlib.use('Agg')
  plt.rcParams |= {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}
  found = results.read(study_smollm2.RESULTS)
  jobs = grid.plan(study_smollm2.get_study(), study_smollm2.get_config())
  records = list(results.planned(jobs, found).values())
  records += [record for record in found if record['grid'] == study_smollm2.FIRST_DESIGN]
  own = {name: [record for record in records if record['grid'] == name] for name in GRIDS}
  own = {name: records for name, records in own.items() if records}
  options = {'layout': 'constrained', 'squeeze': False}
  figure, axes = plt.subplots(len(own), 6, figsize=(17, 3 * len(own)), **options)
  for row, (name, records) in zip(axes, own.items(), strict=True):
    draw(row, GRIDS[name], records)
  figure.savefig(args.out, dpi=130)
  for design in study_smollm2.DESIGNS:
    runs = own.get(design, [])
    print(design)
    for record in own.get(study_smollm2.search_of(design), []) + runs:
      print(table_row(record))
    for line in means(runs) if runs else ():
      print(line)


def draw(axes, title, records):
  """Draws the records of a grid on its row of axes."""
  labels = set()
  for record in records:
    name, colour = METHODS[record['method']]
    rate = record['overrides']['actor.lr']
    label = f'{name}, rate {rate:g}'
    style = {'color': colour, 'linestyle': STYLES[rate], 'linewidth': 1.5}
    if label not in labels:
      style['label'] = label
      labels.add(label)
    axes[0].plot(record['score']['steps'], record['score']['values'], marker='o', **style)
    for axis, (column, panel) in zip(axes[1:], PANELS.items(), strict=True):
      values = np.array(record['series'][column])
      steps = np.array(record['steps'])
      if column == 'train_score':
        values = np.convolve(values, np.ones(WINDOW) / WINDOW, 'valid')
        steps = steps[WINDOW - 1 :]
      axis.plot(steps, values, **style)
      axis.set(title=panel, xlabel='update')
  for axis in axes[1:]:
    axis.set_ylim(0)
  axes[0].set(title='held-out exact match, greedy', xlabel='update', ylabel=title, ylim=(0, 1))
  axes[1].set(ylim=(0, 1))
  axes[0].legend(frameon=False, loc='lower right', fontsize=8)


def table_row(record):
  """Returns a row of the table: scores, rewards of ten updates, and clipped shares."""
  name, _ = METHODS[record['method']]
  rewards = record['series']['train_score']
  tens = [np.mean(rewards[i : i + 10]) for i in range(0, len(rewards) - 4, 10)]
  clipped = record['series']['clip']
  cells = [
      name,
      f'{record["overrides"]["actor.lr"]:g}',
      str(record['seeds'][0]),
      ', '.join(map(share, record['score']['values'])),
      ', '.join(map(share, tens)),
      f'{np.mean(clipped):.1%}, {max(clipped):.0%}',
  ]
  return f'| {" | ".join(cells)} |'


def means(records):
  """Yields means over seeds, and differences of the two methods in the seeds that both have."""
  measures = {
      'last score': lambda record: record['score']['values'][-1],
      'reward of the last ten updates': lambda record: np.mean(
          record['series']['train_score'][-10:]
      ),
      'reward of all updates': lambda record: np.mean(record['series']['train_score']),
  }
  for measure, function in measures.items():
    values = {method: {} for method in METHODS}
    for record in records:
      values[record['method']][record['seeds'][0]] = function(record)
    for method, by_seed in values.items():
      yield f'{measure}, {METHODS[method][0]}: {interval(list(by_seed.values()))}'
    first, second = values.values()
    both = sorted(first.keys() & second.keys())
    differences = [first[seed] - second[seed] for seed in both]
    yield f'{measure}, difference by seed: {interval(differences)}'


def interval(values):
  """Returns the mean of one value per seed with Student's 95% interval, as text."""
  text = f'{np.mean(values):.3f}, {len(values)} seeds'
  if len(values) > 1:
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    text += f', 95% +-{half:.3f}'
  return text


def share(x):
  """Returns a number below 1 with two decimals."""
  return f'{x:.2f}'.lstrip('0')


if __name__ == '__main__':
  main()
