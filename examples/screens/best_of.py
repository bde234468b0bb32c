"""Lets the judge choose among several episodes of a task: a process reward model as a verifier.

  python run.py --config=examples/screens/config.py --mode=eval --workdir=/tmp/screens \
      --config.eval.samples=8
  python -m examples.screens.best_of /tmp/screens/eval/*

The choice has the highest mean judgement over its steps. It is compared with the mean of all
episodes, and with the best one.
"""

import argparse
import collections
from collections.abc import Iterable
import json
import pathlib

import numpy as np


def table(lines: Iterable[str]) -> dict[str, float]:
  """Returns the goals reached by all episodes, by the judge's choices and by the best ones."""
  samples = collections.defaultdict(list)
  for line in lines:
    record = json.loads(line)
    metrics = record['metrics']
    samples[record['task']].append((metrics['judged'], metrics['reached']))
  rows = []
  for episodes in samples.values():
    reached = [score for _, score in episodes]
    _, chosen = max(episodes, key=lambda episode: episode[0])
    rows.append((np.mean(reached), chosen, max(reached)))
  means = np.mean(rows, axis=0)
  return {name: float(mean) for name, mean in zip(('mean', 'judge', 'best'), means)}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('folder', help='folder of an evaluation')
  path = pathlib.Path(parser.parse_args().folder) / 'episodes.jsonl'
  with path.open(encoding='utf-8') as lines:
    for name, score in table(lines).items():
      print(f'{name:6s} {score:.3f}')


if __name__ == '__main__':
  main()
