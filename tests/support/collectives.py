"""Reads the collectives of a compiled program from its text."""

import re

import numpy as np

_PATTERN = (
    r'= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\('
)


def collectives(text):
  """Returns (name, numbers in its largest result) of every collective; each loop counts once."""
  found = []
  for line in text.splitlines():
    op = re.search(_PATTERN, line)
    if op:
      shapes = re.findall(r'\[([\d,]*)\]', op[1])
      sizes = [np.prod([int(n) for n in shape.split(',') if n], dtype=int) for shape in shapes]
      found.append((op[2], int(max(sizes, default=1))))
  return found


def largest_loop(text):
  """Returns the text of the longest body of a loop, without the branches that it calls."""
  names = set(re.findall(r' while\(.*body=%?([\w.\-]+)', text))
  bodies = [part for part in text.split('\n\n') if part.lstrip('%\n').split(' ')[0] in names]
  return max(bodies, key=len)
