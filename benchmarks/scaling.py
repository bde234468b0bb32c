"""How our rollout scales with the number of episodes and turns; no peer.

  python -m benchmarks.scaling --threads=1           # on a machine that does nothing else
  python -m benchmarks.scaling --quick               # does the script work?

1, 2, 4, 8 turns of 32 sampled and 32 observed tokens after prompts of 64, in 32, 128, 512
concurrent episodes. One JSON line each: median and [min, max] of the seconds, and the milliseconds
per episode and turn, which are constant if time is proportional to the work. (Later turns attend to
more tokens; with more than one slot group of 32 rows the host's work overlaps with decoding.)
"""

import tempfile

from absl import app
from absl import flags
import numpy as np

from benchmarks import figures
from benchmarks import side_by_side

TURNS, EPISODES = (1, 2, 4, 8), (32, 128, 512)
PROMPT, TURN = 64, 32
flags.set_default(side_by_side.SIZES, ['0.94M'])


def main(unused_argv):
  side_by_side.run_all(run)


def run(size, threads, quick, repeats):
  """Measures the table of one size and thread setting."""
  with tempfile.TemporaryDirectory() as folder:
    ours = side_by_side.Worker(threads, 'benchmarks.ours', 'Sampling', size, folder)
    model = ours.call('model')
    side_by_side.print_setting(size, threads, model, {'ours': ours})
    draw = lambda *shape: np.random.default_rng(0).integers(1, model['vocab_size'], shape)
    for turns in (1, 2) if quick else TURNS:
      for episodes in (4, 8) if quick else EPISODES:
        job = ours, 'multi_turn', draw(episodes, PROMPT), draw(turns - 1, episodes, TURN), TURN
        found = side_by_side.measure({'ours': job}, episodes * turns * TURN, repeats)['ours']
        seconds = episodes * turns * TURN / found['tokens_per_s']
        figures.print_line(
            {
                'benchmark': 'scaling',
                'size': size,
                'threads': threads,
                'turns': turns,
                'episodes': episodes,
                'seconds': figures.short(np.median(seconds)),
                'spread': figures.min_max(seconds),
                'ms_per_episode_turn': figures.short(1e3 * np.median(seconds) / episodes / turns),
                'tokens_per_s': figures.short(np.median(found['tokens_per_s'])),
                'first_call_s': figures.short(found['first_call_s']),
                'peak_mb': round(found['peak_mb']),
                'repeats': repeats,
            }
        )
    ours.close()


if __name__ == '__main__':
  app.run(main)
