"""Draws the runs of SmolLM2-135M: a line per run of research/study_smollm2.py, a row per design.

python -m research.plot_smollm2 --out=docs/figures/smollm2.png
"""

import argparse

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from research import study_smollm2
from research.study import results

METHODS = {'st_ppo': ('ST-PPO', '#0072B2'), 'ppo': ('token PPO', '#D55E00')}
STYLES = {3e-4: '-', 1e-4: '--'}  # by rate
DESIGNS = {  # title -> grids
    'batches two updates old, two steps': (study_smollm2.FIRST_DESIGN,),
    'batches four updates old, four steps': (study_smollm2.SEARCH, study_smollm2.RUNS),
}
WINDOW = 5  # updates that the mean of the reward covers
PANELS = {
    'train_score': f'reward, mean of {WINDOW} updates',
    'clip': 'clipped share of tokens',
    'entropy': 'entropy of the policy, nats',
}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--out', required=True)
  args = parser.parse_args()
  matplotlib.use('Agg')
  plt.rcParams |= {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}
  records = results.read(study_smollm2.RESULTS)
  designs = {
      title: [record for record in records if record['grid'] in grids]
      for title, grids in DESIGNS.items()
  }
  designs = {title: own for title, own in designs.items() if own}
  options = {'layout': 'constrained', 'squeeze': False}
  figure, axes = plt.subplots(len(designs), 4, figsize=(12, 3 * len(designs)), **options)
  for row, (title, own) in zip(axes, designs.items(), strict=True):
    draw(row, title, own)
  figure.savefig(args.out, dpi=130)


def draw(axes, title, records):
  """Draws the records of a design on four axes."""
  for record in records:
    name, colour = METHODS[record['method']]
    rate = record['overrides']['actor.lr']
    label = f'{name}, rate {rate:g}, seed {record["seeds"][0]}'
    style = {'color': colour, 'linestyle': STYLES[rate], 'label': label, 'linewidth': 1.5}
    axes[0].plot(record['score']['steps'], record['score']['values'], marker='o', **style)
    for axis, (column, panel) in zip(axes[1:], PANELS.items(), strict=True):
      values = np.array(record['series'][column])
      steps = np.array(record['steps'])
      if column == 'train_score':
        values = np.convolve(values, np.ones(WINDOW) / WINDOW, 'valid')
        steps = steps[WINDOW - 1 :]
      axis.plot(steps, values, **style)
      axis.set(title=panel, xlabel='update', ylim=(0, None))
  axes[0].set(title='held-out exact match, greedy', xlabel='update', ylabel=title, ylim=(0, 1))
  axes[1].set(ylim=(0, 1))
  axes[0].legend(frameon=False, loc='lower right', fontsize=8)


if __name__ == '__main__':
  main()
