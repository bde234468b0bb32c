"""What it saves to train the common prefixes of rows once: rows per second, and memory.

  python -m benchmarks.prefixes                     # minutes on two cores
  python -m benchmarks.prefixes --base=/tmp/old     # also compared with another checkout
  python -m benchmarks.prefixes --quick             # a small case

Each case trains the same rows with `config.train.share_prefixes` and without, in turn, each in a
process of its own: an optimizer step of actor and critic, and log-probs and values before it. The
package of another checkout, which may be older than shared prefixes, trains them alone. A `ratio`
above 1 means that sharing is faster. Memory is what the compiled program of the step needs beside
its arguments.
"""

import json
import os
import typing

from absl import app
from absl import flags
import numpy as np

from benchmarks import side_by_side
from benchmarks.prefix_rows import Case

_BASE = flags.DEFINE_string('base', '', 'folder of another checkout')
_CASES = flags.DEFINE_list('cases', [], 'names of cases, by their first words; all by default')


CASES = {
    'grpo, 8 attempts of 128 tokens after prompts of 512': Case(
        'grpo', 2, 8, 0, 512, (640, 0), (640, 1280, 1536), 2
    ),
    'st_ppo, rows of about 800 tokens that begin with the same 150': Case(
        'st_ppo', 32, 1, 150, 150, (800, 100), (1024, 1536), 2, '2.9M'
    ),
    'st_ppo, rows of about 800 tokens with nothing in common': Case(
        'st_ppo', 16, 1, 0, 0, (800, 100), (1024, 1536), 2, '2.9M'
    ),
}
QUICK = Case('grpo', 2, 4, 0, 16, (24, 0), (32, 48), 2, '0.94M')


def main(unused_argv):
  side_by_side.print_machine()
  # Another checkout may lack this script. Its own modules come first there.
  os.environ['PYTHONPATH'] = str(side_by_side.ROOT)
  cases = {'quick': QUICK} if side_by_side.QUICK.value else CASES
  for name, case in cases.items():
    if not _CASES.value or name.startswith(tuple(_CASES.value)):
      compare(name, case)


def compare(name: str, case: Case) -> None:
  """Prints a line for the log-probs of a case, and one for its optimizer step."""
  learners = {'shared': start(case, True), 'alone': start(case, False)}
  if _BASE.value:
    learners['base'] = start(case, False, _BASE.value)
  for what in ('log_probs', 'step'):
    seconds: dict[str, list[float]] = {kind: [] for kind in learners}
    for _ in range(side_by_side.REPEATS.value):
      for kind, learner in learners.items():
        learner.call(what)  # compiles, and brings back memory that a system took while it waited
        seconds[kind].append(learner.timed(what)[1])
    num_rows = case.groups * case.group_size
    line: dict[str, typing.Any] = {
        'benchmark': 'prefixes',
        'what': f'{what}: {name}',
        'size': case.size,
        'rows_per_s': {kind: round(num_rows / np.median(s), 2) for kind, s in seconds.items()},
    }
    for kind in list(learners)[1:]:
      ratios = np.array(seconds[kind]) / seconds['shared']
      line[f'ratio_{kind}'] = round(float(np.median(ratios)), 3)
      line[f'spread_{kind}'] = [round(float(ratios.min()), 3), round(float(ratios.max()), 3)]
    line['tokens'] = {kind: learner.call('num_computed') for kind, learner in learners.items()}
    if what == 'step':
      line['step_mb'] = {kind: learner.call('step_mb') for kind, learner in learners.items()}
    print(json.dumps(line), flush=True)
  for learner in learners.values():
    learner.close()


def start(case: Case, share: bool, root: str = str(side_by_side.ROOT)) -> side_by_side.Worker:
  """Returns a worker with a `Learner`, which has the package of the checkout `root`."""
  cpus = len(os.sched_getaffinity(0))
  return side_by_side.Worker(cpus, 'benchmarks.prefix_rows', 'Learner', case, share, root=root)


if __name__ == '__main__':
  app.run(main)
