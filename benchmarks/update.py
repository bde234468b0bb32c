"""Speed of one PPO update (actor and critic, forward, backward, AdamW) compared with torch.

  python -m benchmarks.update                      # minutes; on a machine that does nothing else
  python -m benchmarks.update --quick              # seconds: does the script work?
  python -m benchmarks.update --profile --sizes=2.9M --threads=1      # profiles ours

Before timing, losses and gradient norms of three steps must agree. Tokens per second count all
tokens of the batch, with prompts and observations. `ppo` is compared with the peer; ST-PPO, which
also computes the clipping bias, with our own `ppo` as `time_over_baseline`. The size of a
micro-batch changes only the speed: both sides are measured with each of --micro_batches. The matrix
products alone, as torch computes them, bound what any program with these products can reach.
"""

import tempfile

from absl import app
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

# Rows, tokens per row.
BATCHES = {
    '0.94M': (32, 192),
    '2.9M': (16, 256),
    '20M': (16, 256),
    '47M': (16, 256),
    '135M': (4, 256),
}
LEARNING_RATE = 1e-5
VARIANTS = ('ppo', 'st_ppo, nothing clipped', 'st_ppo, clipped')
LARGE = ('135M',)  # only PPO, because each variant has its own state, here of 4 GB


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """Measures all figures of one size and thread setting."""
  rows, length = (4, 128) if quick else BATCHES[size]
  sizes = side_by_side.micro_batches(rows)
  is_large = size in LARGE
  others = () if is_large else VARIANTS[1:]
  with tempfile.TemporaryDirectory() as folder:

    def start_ours(micro):
      arguments = (size, folder, rows, length, LEARNING_RATE, micro)
      return side_by_side.Worker(threads, 'benchmarks.ours', 'Learning', *arguments)

    def start_peer(micro):
      arguments = (folder, threads, LEARNING_RATE, batch, micro)
      return side_by_side.Worker(threads, 'benchmarks.torch_peer', 'Learning', *arguments)

    ours = {micro: start_ours(micro) for micro in sizes}
    first = ours[sizes[0]]
    if side_by_side.PROFILE.value:
      side_by_side.print_ops(first.call('profile', 3, 'ppo'))
      return
    batch = first.call('batch')
    peer = {micro: start_peer(micro) for micro in sizes}
    side_by_side.print_setting(
        size, threads, first.call('model'), {'ours': first, 'torch': peer[sizes[0]]}
    )
    first_call_s = {micro: check_same_numbers(ours[micro], peer[micro]) for micro in sizes}
    jobs = {}
    for micro in sizes:
      jobs['ours', micro] = ours[micro], 'update', 'ppo'
      jobs['peer', micro] = peer[micro], 'update'
      jobs['products', micro] = peer[micro], 'products'
      jobs |= {(name, micro): (ours[micro], 'update', name) for name in others}
    found = side_by_side.measure(jobs, rows * length, repeats, settle=is_large)
    for micro, seconds in first_call_s.items():
      for side in ('ours', 'peer'):
        found[side, micro]['first_call_s'] = seconds[side]
    what = f'update, {rows} x {length}: '
    figures.report_fastest('update', what + 'ppo', size, threads, found, 'torch')
    for micro in sizes:
      found['peer', micro] = found['products', micro]
    what_products = what + 'ppo; the peer computes its products alone'
    figures.report_fastest('update', what_products, size, threads, found, 'torch')
    for name in others:
      for micro in sizes:
        figures.report(
            'update',
            f'{what}{name}, micro-batches of {micro}',
            size,
            threads,
            found[name, micro],
            baseline=found['ours', micro],
        )
    jobs = {
        (side, micro): (workers[micro], 'log_probs')
        for micro in sizes
        for side, workers in (('ours', ours), ('peer', peer))
    }
    found = side_by_side.measure(jobs, rows * length, repeats, settle=is_large)
    figures.report_fastest(
        'update', f'log-probs and values, {rows} x {length}', size, threads, found, 'torch'
    )
    for worker in [*ours.values(), *peer.values()]:
      worker.close()


def check_same_numbers(ours, peer, steps=3):
  """Raises unless log-probs, values, losses and gradient norms agree, before and after updates.

  Returns the seconds of each side's first step, in which ours compiles.
  """
  seconds = []
  for a, b in zip(ours.call('log_probs'), peer.call('log_probs')):
    np.testing.assert_allclose(a, b, atol=1e-4, err_msg='log-probs or values differ')
  for _ in range(steps):
    (a, ours_s, _), (b, peer_s, _) = ours.timed('update', 'ppo'), peer.timed('update')
    seconds.append({'ours': ours_s, 'peer': peer_s})
    for name in a:
      np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4, err_msg=name)
  return seconds[0]


if __name__ == '__main__':
  app.run(main)
