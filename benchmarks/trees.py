"""Speed of this tree compared with another checkout of the project, on one CPU.

  git worktree add /tmp/old COMMIT
  python -m benchmarks.trees --base=/tmp/old                 # update, log-probs and sampling
  python -m benchmarks.trees --base=/tmp/old --parts=update

Both trees run their own code in their own process, in turn, with the same model, batch and CPU. A
figure is a JSON line as in the other benchmarks; its peer is the other tree. `ratio` above 1 means
that this tree is faster.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

_BASE = flags.DEFINE_string('base', None, 'folder of the other checkout', required=True)
_PARTS = flags.DEFINE_list('parts', ['update', 'rollout'], 'of update, rollout')
_SIZE = flags.DEFINE_string('size', '0.94M', 'of 0.94M, 2.9M, 20M, 47M')

ROWS, LENGTH, MICRO_BATCH = 32, 192, 8
PROMPT, NEW, TURNS, OBSERVED = 64, 32, 4, 32


def main(unused_argv):
  side_by_side.print_machine()
  with tempfile.TemporaryDirectory() as folder:
    if 'update' in _PARTS.value:
      arguments = ('Learning', _SIZE.value, folder, ROWS, LENGTH, 1e-5, MICRO_BATCH)
      calls = {
          f'update, {ROWS} x {LENGTH}': ('update', 'st_ppo, clipped'),
          f'log-probs and values, {ROWS} x {LENGTH}': ('log_probs',),
      }
      compare('update', arguments, calls, ROWS * LENGTH)
    if 'rollout' in _PARTS.value:
      rng = np.random.default_rng(0)
      prompts = rng.integers(1, 500, (ROWS, PROMPT))
      observations = rng.integers(1, 500, (TURNS - 1, ROWS, OBSERVED))
      calls = {f'{TURNS} turns of {ROWS} rows': ('multi_turn', prompts, observations, NEW)}
      compare('rollout', ('Sampling', _SIZE.value, folder), calls, ROWS * TURNS * NEW)


def compare(benchmark, arguments, calls, num_tokens):
  """Prints a figure per call; `arguments` make the object of `benchmarks.ours` in each tree."""
  workers = {
      'this': side_by_side.Worker(1, 'benchmarks.ours', *arguments),
      'base': side_by_side.Worker(1, 'benchmarks.ours', *arguments, root=_BASE.value),
  }
  for what, call in calls.items():
    jobs = {name: (worker, *call) for name, worker in workers.items()}
    found = side_by_side.measure(jobs, num_tokens, side_by_side.REPEATS.value, warmups=1)
    figures.report(benchmark, what, _SIZE.value, 1, found['this'], 'base', found['base'])
  for worker in workers.values():
    worker.close()


if __name__ == '__main__':
  app.run(main)
