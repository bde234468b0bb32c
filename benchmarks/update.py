"""Speed of one PPO update (actor and critic, forward, backward, AdamW) beside torch, same weights.

  python -m benchmarks.update                      # minutes; on a machine that does nothing else
  python -m benchmarks.update --quick              # seconds: does the script work?
  python -m benchmarks.update --profile --sizes=2.9M --threads=1      # where our time goes

Before anything is timed, losses and gradient norms of three steps must agree. Tokens a second count
all tokens of the batch, prompts and observations included. `ppo` is beside the peer; ST-PPO, which
measures the clipping bias too, beside our own `ppo` as `time_over_baseline`.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import side_by_side

_MICRO_BATCH = flags.DEFINE_integer('micro_batch', 0, 'rows of our micro-batches; 0: all at once')

# Rows, tokens a row.
BATCHES = {'0.94M': (32, 192), '2.9M': (16, 256), '20M': (16, 256), '47M': (16, 256)}
LEARNING_RATE = 1e-5
VARIANTS = ('ppo', 'st_ppo, nothing clipped', 'st_ppo, clipped')


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """All figures of one size and thread setting."""
  rows, length = (4, 128) if quick else BATCHES[size]
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(
      threads, 'benchmarks.ours', 'Learning', size, folder, rows, length, LEARNING_RATE,
      _MICRO_BATCH.value or rows)
    if side_by_side.PROFILE.value:
      side_by_side.print_ops(ours.call('profile', 3, 'ppo'))
      ours.close()
      return
    peer = side_by_side.Worker(
      threads, 'benchmarks.torch_peer', 'Learning', folder, threads, LEARNING_RATE,
      ours.call('batch'))
    side_by_side.print_setting(size, threads, ours.call('model'), {'ours': ours, 'torch': peer})
    first_call_s = check_same_numbers(ours, peer)
    jobs = {name: (ours, 'update', name) for name in VARIANTS} | {'peer': (peer, 'update')}
    found = side_by_side.measure(jobs, rows * length, repeats)
    for name, seconds in first_call_s.items():
      found[name]['first_call_s'] = seconds
    what = f'update, {rows} x {length}: '
    side_by_side.report('update', what + 'ppo', size, threads, found['ppo'], 'torch', found['peer'])
    for name in VARIANTS[1:]:
      side_by_side.report(
        'update', what + name, size, threads, found[name], baseline=found['ppo'])
    jobs = {'ours': (ours, 'log_probs'), 'peer': (peer, 'log_probs')}
    found = side_by_side.measure(jobs, rows * length, repeats)
    side_by_side.report(
      'update', f'log-probs and values, {rows} x {length}', size, threads, found['ours'], 'torch',
      found['peer'])
    ours.close()
    peer.close()


def check_same_numbers(ours, peer, steps=3):
  """Raises unless log-probs, values, losses and gradient norms agree, before and after updates.

  Returns the seconds of each side's first step: ours compiles there.
  """
  seconds = []
  for a, b in zip(ours.call('log_probs'), peer.call('log_probs')):
    np.testing.assert_allclose(a, b, atol=1e-4, err_msg='log-probs or values differ')
  for _ in range(steps):
    (a, ours_s, _), (b, peer_s, _) = ours.timed('update', 'ppo'), peer.timed('update')
    seconds.append({'ppo': ours_s, 'peer': peer_s})
    for name in a:
      np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4, err_msg=name)
  return seconds[0]


if __name__ == '__main__':
  app.run(main)
