"""What a second scheduler buys: the same episodes through training's and through the server's.

  python -m benchmarks.schedulers --threads=2        # on a machine that does nothing else
  python -m benchmarks.schedulers --quick            # does the script work?

128 episodes of four turns. Turns have 4 to 32 sampled tokens, so rows end at different times, and
an environment takes 0 or 50 ms. Each episode keeps its context in the cache between its turns. A
figure is a JSON line as in the other benchmarks. `ratio` above 1 means that the scheduler of
training is faster.
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

TURNS, EPISODES, PROMPT, OBSERVED = 4, 128, 64, 32
WAITS_S = (0.0, 0.05)
flags.set_default(side_by_side.SIZES, ['0.94M'])
flags.set_default(side_by_side.THREADS, ['2'])


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """Prints the figures of one size and thread setting."""
  rng = np.random.default_rng(0)
  episodes = 8 if quick else EPISODES
  prompts = rng.integers(1, 500, (episodes, PROMPT))
  observations = rng.integers(1, 500, (TURNS - 1, episodes, OBSERVED))
  budgets = rng.integers(4, 33, (TURNS, episodes))
  with tempfile.TemporaryDirectory() as folder:
    worker = side_by_side.Worker(threads, 'benchmarks.ours', 'Schedulers', size, folder)
    for wait_s in WAITS_S:
      jobs = {
          name: (worker, name, prompts, observations, budgets, wait_s)
          for name in ('training', 'serving')
      }
      found = side_by_side.measure(jobs, int(budgets.sum()), repeats, warmups=1)
      what = f'{episodes} episodes of {TURNS} turns, {1e3 * wait_s:g} ms per step'
      sides = found['training'], 'serving', found['serving']
      figures.report('schedulers', what, size, threads, *sides)
    worker.close()


if __name__ == '__main__':
  app.run(main)
