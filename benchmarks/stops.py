"""Stops a run with SIGTERM at random moments, while calls of its environments never return.

  python -m benchmarks.stops --stops=20 --staleness=1

Trains the smoke form of the default run. One in fifty steps of its environments blocks for ever, in
one of several ways, and fails after 3 s (config.rollout.env_timeout_s). Each stop has to end the
process within 5 s with exit code 0 and a checkpoint of the last update, and the next start has to
resume there. Prints a JSON line per stop, and one at the end: stops, the shortest, median and
longest time of a stop, stops while a call was blocked, calls that blocked, and updates (exit code 0
if all is as it should be).
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from absl import app
from absl import flags
from absl import logging

from stppo_jax.envs import search
from stppo_jax.monitoring import metrics as metrics_lib

_STOPS = flags.DEFINE_integer('stops', 20, 'how often')
_STALENESS = flags.DEFINE_integer('staleness', 0, 'config.pipeline.staleness')
_SEED = flags.DEFINE_integer('seed', 0, 'of the moments')
_LIMIT_S = 5.0
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LOG = 'STOPS_LOG'  # environment variable: the file to which blocked calls add a line
_SMALL = (
    'train.episodes=16',
    'train.mini_batch=8',
    'train.epochs=1',
    'train.updates=10000',
    'train.checkpoint_every=0',
    'eval.every=3',
    'eval.episodes=16',
    'log.tensorboard=False',
    'retriever.top_k=1',
    'rollout.env_timeout_s=3',
    'rollout.max_failed=1',
    'env.kind=benchmarks.stops:BlockingEnv',
)


class BlockingEnv(search.SearchEnv):
  """The search environment, one step in fifty of which never returns."""

  def step(self, action, passages=search.NOT_SEARCHED):
    if random.random() < 0.02:
      with open(os.environ[_LOG], 'a', encoding='utf-8') as file:
        file.write(f'{time.time()}\n')
      random.choice((_sleep, _wait, _spin, _wait_for_thread, _swallow))()
    return super().step(action, passages)


def _sleep():
  time.sleep(1e6)


def _wait():
  threading.Event().wait()


def _spin():
  while True:
    time.sleep(1e-3)


def _wait_for_thread():
  """A thread of its own, for which Python waits at the end of a process."""
  thread = threading.Thread(target=_sleep)
  thread.start()
  thread.join()


def _swallow():
  while True:
    with contextlib.suppress(BaseException):
      time.sleep(1e6)


def main(unused_argv):
  logging.set_verbosity(logging.WARNING)
  rng = random.Random(_SEED.value)
  took = []
  while_blocked = 0
  with tempfile.TemporaryDirectory() as folder:
    workdir = os.path.join(folder, 'run')
    log = os.path.join(folder, 'blocked')
    errors = os.path.join(folder, 'errors')
    last = 0  # updates of the newest checkpoint
    for number in range(_STOPS.value):
      process = _start(workdir, log, errors)
      while _last_update(workdir) <= last and process.poll() is None:
        time.sleep(0.02)
      time.sleep(rng.uniform(0, 6))
      if process.poll() is not None:
        _fail(f'the run ended by itself, {process.returncode}', errors)
      started = time.monotonic()
      is_blocked = _is_blocked(log)
      process.send_signal(signal.SIGTERM)
      try:
        code = process.wait(60)
      except subprocess.TimeoutExpired:
        process.kill()
        _fail(f'stop {number} took more than 60 s', errors)
      took.append(time.monotonic() - started)
      saved = _last_checkpoint(workdir)
      # An update whose evaluation was stopped is saved, and its line is written when it resumes.
      if code or saved <= last or saved < _last_update(workdir):
        _fail(f'stop {number}: exit code {code}, checkpoint {saved} after {last}', errors)
      line = {
          'stop': number + 1,
          'seconds': round(took[-1], 2),
          'exit_code': code,
          'while_blocked': is_blocked,
          'resumed_after': last,
          'checkpoint': saved,
      }
      print(json.dumps(line), flush=True)
      while_blocked += is_blocked
      last = saved
    steps = [row['step'] for row in metrics_lib.read_metrics(workdir)]
    final = len(steps) - 1
    result = {
        'benchmark': 'stops',
        'staleness': _STALENESS.value,
        'stops': len(took),
        'shortest_s': round(min(took), 2),
        'median_s': round(statistics.median(took), 2),
        'longest_s': round(max(took), 2),
        'while_blocked': while_blocked,
        'blocked_calls': len(_blocked(log)),
        'updates': last,
        'no_gaps': steps == list(range(final + 1)) and final >= last - 1,
    }
  print(json.dumps(result))
  return 0 if max(took) <= _LIMIT_S and result['no_gaps'] else 1


def _start(workdir, log, errors):
  settings = [*_SMALL, f'pipeline.staleness={_STALENESS.value}']
  with open(errors, 'w', encoding='utf-8') as stderr:
    return subprocess.Popen(
        [
            sys.executable,
            'run.py',
            '--config=experiments/st_ppo_tiny.py:smoke',
            f'--workdir={workdir}',
            *(f'--config.{setting}' for setting in settings),
        ],
        cwd=_ROOT,
        env=os.environ | {_LOG: log},
        stderr=stderr,
    )


def _last_update(workdir):
  """Returns the number of updates in metrics.jsonl."""
  path = os.path.join(workdir, metrics_lib.FILE_NAME)
  if not os.path.exists(path):
    return 0
  with open(path, encoding='utf-8') as file:
    lines = file.read().splitlines()
  return max(0, len(lines) - 1)


def _last_checkpoint(workdir):
  """Returns the updates of the newest checkpoint."""
  folder = os.path.join(workdir, 'checkpoints')
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return max((int(name) for name in names if name.isdigit()), default=0)


def _blocked(log):
  if not os.path.exists(log):
    return []
  with open(log, encoding='utf-8') as file:
    return [float(line) for line in file]


def _is_blocked(log):
  """Returns whether a call blocks now: it began less than its limit of 3 s ago."""
  return any(time.time() - began < 3 for began in _blocked(log))


def _fail(message, errors):
  with open(errors, encoding='utf-8') as file:
    sys.exit(f'benchmarks.stops: {message}\n{file.read()[-3000:]}')


if __name__ == '__main__':
  app.run(main)
