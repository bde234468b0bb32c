"""The figures that the benchmarks print: one JSON line for each."""

import json

import numpy as np

# A figure whose largest repeat is more than so many times its smallest is marked as unreliable.
MAX_SPREAD = 1.5


def report(benchmark, what, size, threads, ours, peer_name=None, peer=None, baseline=None):
  """Prints one figure: medians and [min, max] of the repeats and of adjacent repeats' ratios.

  `ours`, `peer` and `baseline` (another figure of ours) are values of `measure`'s result.
  """
  line = {
      'benchmark': benchmark,
      'what': what,
      'size': size,
      'threads': threads,
      'peer': peer_name,
      'ours_tokens_per_s': short(np.median(ours['tokens_per_s'])),
      'peer_tokens_per_s': None,
      'ratio': None,
      'spread': {'ours': min_max(ours['tokens_per_s'])},
      'per_cpu_s': {'ours': short(np.median(ours['tokens_per_cpu_s']))},
      'first_call_s': {'ours': short(ours['first_call_s'])},
      'peak_mb': {'ours': round(ours['peak_mb'])},
  }
  if peer is not None:
    ratios = ours['tokens_per_s'] / peer['tokens_per_s']
    line['peer_tokens_per_s'] = short(np.median(peer['tokens_per_s']))
    line['ratio'] = short(np.median(ours['tokens_per_s']) / np.median(peer['tokens_per_s']))
    line['spread'] |= {'peer': min_max(peer['tokens_per_s']), 'ratio': min_max(ratios)}
    line['per_cpu_s']['peer'] = short(np.median(peer['tokens_per_cpu_s']))
    line['first_call_s']['peer'] = short(peer['first_call_s'])
    line['peak_mb']['peer'] = round(peer['peak_mb'])
  if baseline is not None:
    ratios = baseline['tokens_per_s'] / ours['tokens_per_s']
    line['time_over_baseline'] = short(np.median(ratios))
    line['spread']['time_over_baseline'] = min_max(ratios)
  print_line(
      line | {'unreliable': unreliable(line['spread']), 'repeats': len(ours['tokens_per_s'])}
  )


def report_fastest(benchmark, what, size, threads, found, peer_name):
  """`report` of both sides with the same micro-batches, and of each side's fastest.

  found: {('ours' or 'peer', rows of a micro-batch): figures}.
  """
  sides = {
      side: {rows: figures for (this, rows), figures in found.items() if this == side}
      for side in ('ours', 'peer')
  }
  for rows, ours in sides['ours'].items():
    report(
        benchmark,
        f'{what}, micro-batches of {rows}',
        size,
        threads,
        ours,
        peer_name,
        sides['peer'][rows],
    )
  speed = lambda figures: np.median(figures['tokens_per_s'])
  ours, peer = (max(side, key=lambda rows: speed(side[rows])) for side in sides.values())
  report(
      benchmark,
      f'{what}, each at its fastest: micro-batches of {ours} and {peer}',
      size,
      threads,
      sides['ours'][ours],
      peer_name,
      sides['peer'][peer],
  )


def unreliable(spread):
  """Returns the names of what varied too much between repeats: another run may say otherwise."""
  return [name for name, (least, most) in spread.items() if most > MAX_SPREAD * least]


def print_line(line):
  """Prints one JSON line."""
  print(json.dumps(line), flush=True)


def min_max(x):
  """Returns [min, max]."""
  return [short(np.min(x)), short(np.max(x))]


def short(x):
  """Rounds to four significant digits."""
  return float(f'{x:.4g}')
