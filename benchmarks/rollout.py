"""Speed of sampling compared with transformers' `generate` and tunix's `Sampler`.

  python -m benchmarks.rollout --tunix_python=PATH           # on a machine that does nothing else
  python -m benchmarks.rollout --quick                       # seconds: does the script work?
  python -m benchmarks.rollout --sizes=2.9M,20M,47M --threads=1 --figures=sample,episodes
  python -m benchmarks.rollout --profile                     # profiles ours, without a peer

`sample`: 32 prompts of 64 tokens, then exactly 128 sampled tokens. For 135M it is 16 prompts of 128
tokens and 64 sampled ones. `products`: ours and the matrix products of `sample` alone, as torch
computes them: no program with these products is faster. `turns`: 4 turns of 32 sampled and 32
observed tokens. `episodes`: 64 episodes of 4 turns of 128 sampled and 128 observed tokens, with a
retriever that takes 50 ms per batch of queries. Tokens per second count sampled tokens; the time
includes the prefill of prompts and observations. Ours also returns each token's log-prob, which the
peers do not compute.

tunix's sampler cannot continue from an earlier call's cache, so it prefills the whole conversation
in every turn. It gets a cache no larger than the turn needs, and a program compiled for it.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

_FIGURES = flags.DEFINE_list(
    'figures', ['sample', 'turns', 'episodes'], 'of sample, products, turns, episodes'
)

SAMPLES = {'135M': (16, 128, 64)}  # rows, tokens of a prompt, sampled tokens
OTHERS = (32, 64, 128)
TURNS, OBSERVED = 4, 32
EPISODES, LONG_TURN, RETRIEVER_S = 64, 128, 0.05


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """Measures all figures of one size and thread setting."""
  rows, prompt, num_new = (4, 64, 16) if quick else SAMPLES.get(size, OTHERS)
  turn = 8 if quick else 32
  episodes, long_turn = (8, 16) if quick else (EPISODES, LONG_TURN)
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(threads, 'benchmarks.ours', 'Sampling', size, folder)
    model = ours.call('model')
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(1, model['vocab_size'], shape)
    prompts, observations = draw(rows, prompt), draw(TURNS - 1, rows, OBSERVED)
    if side_by_side.PROFILE.value:
      side_by_side.print_ops(ours.call('profile', 2, prompts, num_new))
      ours.close()
      return
    peers = {
        'torch': side_by_side.Worker(threads, 'benchmarks.torch_peer', 'Sampling', folder, threads)
    }
    if not side_by_side.tunix_left_out('rollout'):
      peers['tunix'] = side_by_side.Worker(
          threads,
          'benchmarks.tunix_peer',
          'Sampling',
          folder,
          python=side_by_side.TUNIX_PYTHON.value,
      )
    side_by_side.print_setting(size, threads, model, {'ours': ours} | peers)
    for name, peer in peers.items():
      check_same_model(ours, name, peer, prompts)

    def compare(what, num_tokens, names, method, peer_method, *args):
      jobs = {'ours': (ours, method, *args)}
      jobs |= {name: (peers[name], peer_method, *args) for name in names}
      found = side_by_side.measure(jobs, num_tokens, repeats)
      for name in names:
        figures.report('rollout', what, size, threads, found['ours'], name, found[name])

    if 'sample' in _FIGURES.value:
      compare('sample', rows * num_new, peers, 'sample', 'sample', prompts, num_new)
    if 'products' in _FIGURES.value:
      what = 'sample; the peer computes its products alone'
      compare(what, rows * num_new, ['torch'], 'sample', 'products', prompts, num_new)
    if 'turns' in _FIGURES.value:
      for what, names, method, peer_method in (
          ('turns: our cache kept, the peer re-sends', peers, 'multi_turn', 'multi_turn_resending'),
          ('turns: both re-send', peers, 'multi_turn_resending', 'multi_turn_resending'),
          ('turns: both keep the cache', ['torch'], 'multi_turn', 'multi_turn'),
      ):
        compare(what, rows * TURNS * turn, names, method, peer_method, prompts, observations, turn)
    if 'episodes' in _FIGURES.value:
      compare(
          'episodes with a slow retriever: our cache kept, the peer re-sends',
          episodes * TURNS * long_turn,
          peers,
          'multi_turn',
          'multi_turn_resending',
          draw(episodes, prompt),
          draw(TURNS - 1, episodes, long_turn),
          long_turn,
          RETRIEVER_S,
      )
    for worker in (ours, *peers.values()):
      worker.close()


def check_same_model(ours, name, peer, prompts, num_new=8):
  """Raises unless both continue the prompts with the same most likely tokens."""
  a, b = ours.call('greedy', prompts, num_new), peer.call('greedy', prompts, num_new)
  if not np.array_equal(a, b):
    raise RuntimeError(f'{name}: {np.mean(a != b):.1%} of greedy tokens differ: not the same model')


if __name__ == '__main__':
  app.run(main)
