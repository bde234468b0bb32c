"""Kills a real run with kill -9 at random moments; the result must equal an undisturbed run's bits.

  python -m benchmarks.kills --kills=20 --staleness=0

Trains the smoke form of the default run twice: once undisturbed, and once killed and restarted,
mostly during an update or the following save, otherwise during start-up. Prints one JSON line:
kills, kills during a save, updates, and whether metrics and parameters are equal (exit code 0).
"""

import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from stppo_jax.monitoring import metrics as metrics_lib

_KILLS = flags.DEFINE_integer('kills', 20, 'how often')
_STALENESS = flags.DEFINE_integer('staleness', 0, 'config.pipeline.staleness')
_SEED = flags.DEFINE_integer('seed', 0, 'of the moments')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SMALL = (
    'train.episodes=8',
    'train.mini_batch=4',
    'train.epochs=1',
    'train.schedule_updates=10000',  # or a run may not be given fewer updates than it began with
    'train.checkpoint_every=1',
    'eval.every=0',
    'eval.episodes=8',
    'log.tensorboard=False',
    'retriever.top_k=1',
)


def main(unused_argv):
  logging.set_verbosity(logging.WARNING)
  rng = random.Random(_SEED.value)
  with tempfile.TemporaryDirectory() as folder:
    killed, straight = (os.path.join(folder, name) for name in ('killed', 'straight'))
    kills = during_save = lines = 0
    while kills < _KILLS.value:
      process = _start(killed, updates=10_000)
      if rng.random() < 0.2:  # while it starts
        time.sleep(rng.uniform(0, 10))
      else:
        while _num_lines(killed) <= lines and process.poll() is None:
          time.sleep(0.01)
        time.sleep(rng.uniform(0, 2))
      if process.poll() is not None:
        sys.exit(f'benchmarks.kills: the run ended by itself, {process.returncode}')
      process.kill()
      process.wait()
      kills += 1
      during_save += bool(glob.glob(os.path.join(killed, 'checkpoints', '*tmp*')))
      lines = max(lines, _num_lines(killed))
    updates = lines + 1
    for workdir in (killed, straight):
      if _start(workdir, updates).wait():
        sys.exit(f'benchmarks.kills: the run in {workdir} failed')
    same_metrics = _metrics(killed) == _metrics(straight)
    same_state = jax.tree.all(
        jax.tree.map(np.array_equal, _state(killed, updates), _state(straight, updates))
    )
  print(
      json.dumps(
          {
              'benchmark': 'kills',
              'staleness': _STALENESS.value,
              'kills': kills,
              'during_save': during_save,
              'updates': updates,
              'equal_metrics': same_metrics,
              'equal_state': same_state,
          }
      )
  )
  return 0 if same_metrics and same_state else 1


def _start(workdir, updates):
  settings = [*_SMALL, f'train.updates={updates}', f'pipeline.staleness={_STALENESS.value}']
  return subprocess.Popen(
      [
          sys.executable,
          'run.py',
          '--config=experiments/st_ppo_tiny.py:smoke',
          f'--workdir={workdir}',
          *(f'--config.{setting}' for setting in settings),
      ],
      cwd=_ROOT,
      stderr=subprocess.DEVNULL,
  )


def _num_lines(workdir):
  path = os.path.join(workdir, metrics_lib.FILE_NAME)
  if not os.path.exists(path):
    return 0
  with open(path, 'rb') as file:
    return file.read().count(b'\n')


def _metrics(workdir):
  """Returns the lines without timings and compiler figures."""
  return [
      {
          name: value
          for name, value in row.items()
          if name != 'time' and not name.startswith(('timing_s/', 'perf/'))
      }
      for row in metrics_lib.read_metrics(workdir)
  ]


def _state(workdir, updates):
  path = os.path.join(workdir, 'checkpoints', str(updates), 'state')
  with ocp.StandardCheckpointer() as checkpointer:
    return jax.device_get(checkpointer.restore(path))


if __name__ == '__main__':
  app.run(main)
