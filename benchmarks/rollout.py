"""Speed of sampling beside transformers' `generate`, with the same weights and prompts.

  python -m benchmarks.rollout                     # minutes; on a machine that does nothing else
  python -m benchmarks.rollout --quick             # seconds: does the script work?
  python -m benchmarks.rollout --sizes=2.9M --threads=1 --repeats=9
  python -m benchmarks.rollout --profile           # where our time goes, and no peer

Single turn: prompts of 64 tokens, then exactly 128 sampled ones. Multi-turn: 4 turns of 32 sampled
and 32 observed tokens; and 64 episodes of 4 turns of 128 sampled and 128 observed tokens, where a
retriever takes 50 ms for the queries that it gets together. Tokens a second count sampled tokens;
reading prompts and observations is in the time. Ours also reports each token's log-prob, which
`generate` is not asked for.
"""

import tempfile

from absl import app
import numpy as np

from benchmarks import side_by_side


PROMPT, TURNS, OBSERVED = 64, 4, 32
EPISODES, LONG_TURN, RETRIEVER_S = 64, 128, 0.05


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """All figures of one size and thread setting."""
  rows, num_new, turn = (4, 16, 8) if quick else (32, 128, 32)
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(threads, 'benchmarks.ours', 'Sampling', size, folder)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.integers(1, ours.call('vocab_size'), shape)
    prompts, observations = draw(rows, PROMPT), draw(TURNS - 1, rows, OBSERVED)
    if side_by_side.PROFILE.value:
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
    episodes, turn = (8, 16) if quick else (EPISODES, LONG_TURN)
    compare(
      'episodes with a slow retriever: the peer re-sends', episodes * TURNS * turn, 'multi_turn',
      'multi_turn_resending', draw(episodes, PROMPT), draw(TURNS - 1, episodes, turn), turn,
      RETRIEVER_S)
    ours.close()
    peer.close()


def check_same_model(ours, peer, prompts, num_new=8):
  """Raises unless both continue the prompts with the same likeliest tokens."""
  a, b = ours.call('greedy', prompts, num_new), peer.call('greedy', prompts, num_new)
  if not np.array_equal(a, b):
    raise RuntimeError(f'{np.mean(a != b):.1%} of greedy tokens differ: not the same model')


if __name__ == '__main__':
  app.run(main)
