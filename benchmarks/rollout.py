"""Speed of sampling beside transformers' `generate`, with the same weights and prompts.

  python -m benchmarks.rollout                     # minutes; on a machine that does nothing else
  python -m benchmarks.rollout --quick             # seconds: does the script work?
  python -m benchmarks.rollout --sizes=2.9M --threads=1 --repeats=9
  python -m benchmarks.rollout --profile           # where our time goes, and no peer

Single turn: prompts of 64 tokens, then exactly 128 sampled ones. Multi-turn: 4 turns of 32 sampled
and 32 observed tokens. Tokens a second count sampled tokens; reading prompts and observations is in
the time. Ours also reports each token's log-prob, which `generate` is not asked for.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import side_by_side

_SIZES = flags.DEFINE_list('sizes', ['0.66M', '2.9M'], 'of 0.66M, 2.9M, 20M')
_THREADS = flags.DEFINE_list('threads', ['1', '2'], 'CPUs a framework may use')
_REPEATS = flags.DEFINE_integer('repeats', 7, 'timed runs of each', lower_bound=1)
_QUICK = flags.DEFINE_bool('quick', False, 'one size, one thread, few tokens: a smoke test')
_PROFILE = flags.DEFINE_bool('profile', False, 'print the ops that take our time instead')

PROMPT, TURNS, OBSERVED = 64, 4, 32


def main(unused_argv):
  quick = _QUICK.value
  sizes = ['0.66M'] if quick else _SIZES.value
  threads = [1] if quick else [int(n) for n in _THREADS.value]
  side_by_side.print_machine()
  for size in sizes:
    for num_threads in threads:
      run(size, num_threads, quick)


def run(size, threads, quick):
  """All figures of one size and thread setting."""
  rows, num_new, turn = (4, 16, 8) if quick else (32, 128, 32)
  repeats = 2 if quick else _REPEATS.value
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(threads, 'benchmarks.ours', 'Sampling', size, folder)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(1, ours.call('vocab_size'), shape)
    prompts, observations = draw(rows, PROMPT), draw(TURNS - 1, rows, OBSERVED)
    if _PROFILE.value:
      side_by_side.print_ops(ours.call('profile', 2, prompts, num_new))
      ours.close()
      return
    peer = side_by_side.Worker(threads, 'benchmarks.torch_peer', 'Sampling', folder, threads)
    check_same_model(ours, peer, prompts)

    def compare(what, num_tokens, method, peer_method, *args):
      found = side_by_side.measure(
        {'ours': (ours, method, *args), 'peer': (peer, peer_method, *args)}, num_tokens, repeats)
      side_by_side.report('rollout', what, size, threads, found['ours'], found['peer'])

    compare('sample', rows * num_new, 'sample', 'sample', prompts, num_new)
    turns = rows * TURNS * turn, prompts, observations, turn
    for what, method, peer_method in (
      ('multi-turn: our cache kept, the peer re-sends', 'multi_turn', 'multi_turn_resending'),
      ('multi-turn: both re-send', 'multi_turn_resending', 'multi_turn_resending'),
      ('multi-turn: both keep the cache', 'multi_turn', 'multi_turn'),
    ):
      compare(what, turns[0], method, peer_method, *turns[1:])
    ours.close()
    peer.close()


def check_same_model(ours, peer, prompts, num_new=8):
  """Raises unless both continue the prompts with the same likeliest tokens."""
  a, b = ours.call('greedy', prompts, num_new), peer.call('greedy', prompts, num_new)
  if not np.array_equal(a, b):
    raise RuntimeError(f'{np.mean(a != b):.1%} of greedy tokens differ: not the same model')


if __name__ == '__main__':
  app.run(main)
