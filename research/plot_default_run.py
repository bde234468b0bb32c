"""Draws the default run and its rivals: a curve per rule, with a band over the five seeds.

The norm of the clipping bias is measured only where a rule divides by it.

  python -m research.plot_default_run --out=docs/default_run.png
"""

import argparse

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from research import study_stability
from research.study import results

SEEDS = 5
RULES = {  # name -> (label, colour), by the palette of Okabe and Ito
    'st_ppo': ('ST-PPO', '#0072B2'),
    'turn_ppo': ('Turn-PPO', '#56B4E9'),
    's_ppo': ('S-PPO', '#E69F00'),
    'ppo': ('token PPO', '#D55E00'),
    'rs_ppo': ('RS-PPO (ours)', '#999999'),
}


def read(rule: str) -> list[dict]:
  """Returns the records of a rule at its best rate, one per seed."""
  rate = study_stability.BEST_RATES[rule]
  by_seed = {}
  for record in results.read(study_stability.RESULTS):
    is_default_run = record['grid'] == 'default_run' and record['method'] == rule
    if is_default_run and record['overrides']['actor.lr'] == rate:
      by_seed[record['seeds'][0]] = record
  return [by_seed[seed] for seed in sorted(by_seed)]


def draw(axis, rule: str, steps: list[int], values: np.ndarray):
  """Draws the mean of values [seeds, steps], and a band from the lowest to the highest seed."""
  label, colour = RULES[rule]
  axis.plot(steps, values.mean(axis=0), color=colour, label=label, linewidth=1.8)
  axis.fill_between(
      steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--out', required=True)
  args = parser.parse_args()
  matplotlib.use('Agg')
  plt.rcParams |= {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}
  figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout='constrained')
  for rule in RULES:
    records = read(rule)
    if len(records) < SEEDS:
      print(f'{rule} is left out: {len(records)} of {SEEDS} seeds')
      continue
    scores = np.array([record['score']['values'] for record in records])
    draw(axes[0], rule, records[0]['score']['steps'], scores)
    clip = np.array([record['series']['clip'] for record in records])
    draw(axes[1], rule, records[0]['steps'], clip)
    if 'bias_norm' in records[0]['series']:
      bias = np.array([record['series']['bias_norm'] for record in records])
      draw(axes[2], rule, records[0]['steps'], bias)
  axes[0].set(title='held-out exact match', xlabel='update', ylim=(0, 1))
  axes[1].set(title='clipped share of tokens', xlabel='update', ylim=(0, None))
  axes[2].set(title='norm of the clipping bias', xlabel='update', ylim=(0, None))
  axes[0].legend(frameon=False, loc='lower right')
  figure.savefig(args.out, dpi=130)


if __name__ == '__main__':
  main()
