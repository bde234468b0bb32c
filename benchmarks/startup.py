"""Time to a run's first update and its memory, with an empty and with a full compilation cache.

  python -m benchmarks.startup                       # on a machine that does nothing else
  python -m benchmarks.startup --quick               # the smoke run: does the script work?

Runs `run.py --config=experiments/st_ppo_tiny.py` for two updates with an empty compilation cache
('cold'), then in another folder with the cache of that run ('warm'). Before the first update it
answers 96 held-out questions, the minimum, with one call of the evaluation's sampler. Times `_at`
are in seconds from the start of the process. In the cold run the second update may still compile
shapes that the first did not have. `peak_mb` is of the whole run.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app

from benchmarks import figures
from benchmarks import side_by_side

_ROOT = pathlib.Path(__file__).parent.parent


def main(unused_argv):
  side_by_side.print_machine()
  with tempfile.TemporaryDirectory() as folder:
    for name in ('cold', 'warm'):
      figures.print_line(
          {'benchmark': 'startup', 'cache': name} | run(os.path.join(folder, name), folder)
      )


def run(workdir, folder):
  """Measures one run of two updates."""
  config = 'experiments/st_ppo_tiny.py' + (':smoke' if side_by_side.QUICK.value else '')
  started = time.time()
  with open(os.path.join(folder, 'log'), 'w', encoding='utf-8') as log:
    process = subprocess.Popen(
        [
            sys.executable,
            'run.py',
            f'--config={config}',
            f'--workdir={workdir}',
            '--config.train.updates=2',
            '--config.eval.every=0',
            '--config.eval.episodes=96',
        ],
        cwd=_ROOT,
        stdout=log,
        stderr=log,
        env=os.environ | {'JAX_COMPILATION_CACHE_DIR': os.path.join(folder, 'cache')},
    )
    _, status, usage = os.wait4(process.pid, 0)  # RUSAGE_CHILDREN would add other processes
  ended = time.time()
  if status:
    with open(os.path.join(folder, 'log'), encoding='utf-8') as log:
      raise RuntimeError(f'the run failed; its last words:\n{log.read()[-2000:]}')
  with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as file:
    evaluated, first, second = map(json.loads, file)
  return {
      name: figures.short(x)
      for name, x in {
          'first_evaluation_at': evaluated['time'] - started,
          'first_update_at': first['time'] - started,
          'first_update_s': first['timing_s/step'],
          'second_update_s': second['timing_s/step'],
          'whole_run_s': ended - started,
          'cpu_s': usage.ru_utime + usage.ru_stime,
          'peak_mb': side_by_side.peak_mb(usage),
      }.items()
  }


if __name__ == '__main__':
  app.run(main)
