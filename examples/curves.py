"""Writes the learning curves of an example from runs with different seeds, and draws them.

  python -m examples.curves examples/rooms dense=/tmp/rooms/0,/tmp/rooms/1,/tmp/rooms/2 \
      --config=examples/rooms/config.py --players=Expert,Player

Writes curve.csv (a line per run and update) and curve.png into the folder. A dashed line marks the
score of each player on the held-out tasks. Needs `pip install ".[study]"`.
"""

import argparse
import csv
import importlib
import pathlib
import random

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from scripts import warm_start
from stppo_jax.assembly import components
from stppo_jax.monitoring import metrics as metrics_lib

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#E69F00')  # Okabe and Ito's palette


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('folder')
  parser.add_argument('runs', nargs='+', help='LABEL=WORKDIR,WORKDIR')
  parser.add_argument('--config', required=True)
  parser.add_argument('--players', default='Expert')
  args = parser.parse_args()
  config = warm_start.load_config(args.config)
  metric = components.resolve(config).env.core_metrics[0]
  folder = pathlib.Path(args.folder)
  curves = {}
  for text in args.runs:
    label, _, workdirs = text.partition('=')
    curves[label] = [read(workdir, metric, config.train.updates) for workdir in workdirs.split(',')]
  write(folder / 'curve.csv', metric, curves)
  module = importlib.import_module(f'examples.{folder.name}.player')
  bars = {name: play(config, getattr(module, name)) for name in args.players.split(',')}
  draw(folder / 'curve.png', metric, curves, bars)
  for name, score in bars.items():
    print(f'{name}: {score:.3f} {metric} on held-out tasks')


def read(workdir: str, metric: str, updates: int) -> list[tuple[int, float | None, float | None]]:
  """Returns (update, sampled score, held-out greedy score) of a run; None where not measured.

  A longer run is cut after `updates`.
  """
  rows = [row for row in metrics_lib.read_metrics(workdir) if row['step'] <= updates]
  names = (f'{metric}/mean', f'val-core/all/{metric}')
  return [(row['step'], *(row.get(name) for name in names)) for row in rows]


def play(config, make_player) -> float:
  """Returns a player's mean score on the held-out tasks."""
  named = components.resolve(config)
  scores = []
  for task in named.load_tasks(config.data.eval_split):
    metrics = play_episode(named.env(task, task.seed), task.seed, make_player)
    scores.append(metrics[named.env.core_metrics[0]])
  return float(np.mean(scores))


def play_episode(env, seed: int, make_player) -> dict[str, float]:
  """Plays an episode, with a player for each role; returns the environment's last metrics."""
  rng = random.Random(seed)
  text, info = env.reset(seed=seed)
  players = {}
  is_over = False
  while not is_over:
    role = info.get('role', '')
    if role not in players:
      players[role] = make_player(random.Random(rng.random()))
    action = players[role].act(text)
    text, _, terminated, truncated, info = env.step(action)
    is_over = terminated or truncated
  return info['metrics']


def write(path: pathlib.Path, metric: str, curves: dict[str, list]) -> None:
  """Writes all curves as one table."""
  with path.open('w', encoding='utf-8', newline='') as file:
    table = csv.writer(file, lineterminator='\n')
    table.writerow(('label', 'seed', 'update', f'sampled_{metric}', f'held_out_{metric}'))
    for label, runs in curves.items():
      for seed, rows in enumerate(runs):
        for step, sampled, held_out in rows:
          numbers = ['' if x is None else round(x, 4) for x in (sampled, held_out)]
          table.writerow((label, seed, step, *numbers))


def draw(path: pathlib.Path, metric: str, curves: dict[str, list], bars: dict[str, float]) -> None:
  """Draws the mean over seeds with a band from the lowest to the highest seed."""
  matplotlib.use('Agg')
  plt.rcParams |= {'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False}
  figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout='constrained', sharey=True)
  for column, (axis, title) in enumerate(zip(axes, ('sampled', 'held out, greedy')), start=1):
    for colour, (label, runs) in zip(COLOURS, curves.items()):
      steps = [row[0] for row in runs[0] if row[column] is not None]
      values = np.array([[row[column] for row in rows if row[column] is not None] for rows in runs])
      axis.plot(steps, values.mean(axis=0), color=colour, label=label, linewidth=1.8)
      lowest = values.min(axis=0)
      highest = values.max(axis=0)
      axis.fill_between(steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    for name, score in bars.items():
      axis.axhline(score, color='#999999', linestyle='--', linewidth=1)
      axis.annotate(name, (0, score), fontsize=7, color='#666666', va='bottom')
    axis.set(title=f'{metric} ({title})', xlabel='update')
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0), max(high, 1.05))
  axes[1].legend(frameon=False, loc='lower right')
  figure.savefig(path, dpi=110)


if __name__ == '__main__':
  main()
