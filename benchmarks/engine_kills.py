"""Kills trainer and engine at random with kill -9: no question may be lost or played twice.

  python -m benchmarks.engine_kills --kills=20 --staleness=2
  python -m benchmarks.engine_kills --kills=20 --python=VENV/bin/python    # vLLM as the engine

A run on 24 questions, 8 per update, is sampled by an engine. One of the two processes is killed at
random moments and started again. Prints a row per kill, and at the end a JSON line. The questions
of all updates, in their order and cut into epochs, must be a permutation of all questions each.
"""

import collections
import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

from benchmarks import servers
from stppo_jax import tasks as tasks_lib
from stppo_jax.models import convert
from stppo_jax.rollout import prepare

_KILLS = flags.DEFINE_integer('kills', 20, 'how often')
_STALENESS = flags.DEFINE_integer('staleness', 2, 'config.pipeline.staleness')
_SEED = flags.DEFINE_integer('seed', 0, 'of the moments')
_PYTHON = flags.DEFINE_string('python', '', 'Python with vLLM; empty: our gateway is the engine')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUESTIONS = 24
_SMALL = (
    'train.episodes=8',
    'train.mini_batch=4',
    'train.epochs=1',
    'train.schedule_updates=10000',
    'train.checkpoint_every=1',
    'eval.every=0',
    'eval.episodes=8',
    'log.tensorboard=False',
    'data.datasets=()',
    'rollout.engine_kind={kind}',
    'rollout.engine={address}',
    'data.source={folder}/data',
    'data.corpus=embedded',
    'pipeline.staleness={staleness}',
)


def main(unused_argv):
  with tempfile.TemporaryDirectory() as folder:
    _write_questions(folder)
    result = kill_at_random(folder)
  print(json.dumps(result), flush=True)
  return 0 if not (result['lost'] or result['doubled']) else 1


def kill_at_random(folder: str) -> dict:
  """Runs, kills and finishes; returns the counts."""
  rng = random.Random(_SEED.value)
  workdir = os.path.join(folder, 'run')
  port = servers.free_port()
  engine = _start_engine(folder, port)
  trainer = None
  began = time.monotonic()
  print('| kill | seconds | process | updates done | a save or push in progress |', flush=True)
  print('|--:|--:|---|--:|---|', flush=True)
  try:
    servers.wait_until_healthy(engine, port)
    trainer = _start_trainer(folder, port, updates=10_000)
    for kill in range(1, _KILLS.value + 1):
      _wait_for_update(workdir, _num_updates(workdir) + 1, trainer)
      time.sleep(rng.uniform(0, 3))
      target = rng.choice(['trainer', 'engine'])
      writes = glob.glob(f'{workdir}/checkpoints/*tmp*') + glob.glob(f'{workdir}/weights/*/*.partial')
      row = (kill, round(time.monotonic() - began), target, _num_updates(workdir), bool(writes))
      print('| ' + ' | '.join(map(str, row)) + ' |', flush=True)
      if target == 'trainer':
        _kill(trainer)
        trainer = _start_trainer(folder, port, updates=10_000)
      else:
        _kill(engine)
        time.sleep(rng.uniform(0, 3))
        engine = _start_engine(folder, port)
    updates = _num_updates(workdir) + 3
    _kill(trainer)
    trainer = _start_trainer(folder, port, updates)
    if trainer.wait():
      sys.exit('benchmarks.engine_kills: the last run failed')
  finally:
    _kill(engine)
    if trainer is not None:
      _kill(trainer)
  return {'benchmark': 'engine_kills', 'kills': _KILLS.value} | count(workdir, updates)


def count(workdir: str, updates: int) -> dict:
  """Returns how many questions of the records were lost, or played twice in an epoch."""
  order = []
  for update in range(1, updates + 1):
    path = os.path.join(workdir, 'episodes', f'train_{update:06d}.jsonl')
    with open(path, encoding='utf-8') as file:
      order += [json.loads(line)['task'] for line in file]
  lost = doubled = 0
  num_epochs = len(order) // QUESTIONS
  for epoch in range(num_epochs):
    played = collections.Counter(order[epoch * QUESTIONS : (epoch + 1) * QUESTIONS])
    lost += QUESTIONS - len(played)
    doubled += sum(played.values()) - len(played)
  return {'updates': updates, 'epochs': num_epochs, 'lost': lost, 'doubled': doubled}


def _write_questions(folder):
  """Writes some of the embedded questions, and the model for vLLM."""
  os.makedirs(os.path.join(folder, 'data'))
  with open(os.path.join(folder, 'data', 'qa.jsonl'), 'w', encoding='utf-8') as file:
    for split, number in (('train', QUESTIONS), ('dev', 8)):
      for task in tasks_lib.load_tasks('embedded', split)[:number]:
        fields = {'id': task.id, 'question': task.question, 'answers': list(task.answers)}
        file.write(json.dumps(fields | {'split': split, 'dataset': task.dataset}) + '\n')
  shape, params = convert.load_hf(prepare.EMBEDDED_MODEL)
  model = os.path.join(folder, 'model')
  convert.save_hf(model, shape, params, prepare.EMBEDDED_MODEL)


def _start_engine(folder, port):
  log = os.path.join(folder, 'engine.log')
  if _PYTHON.value:
    return servers.start_vllm(_PYTHON.value, os.path.join(folder, 'model'), port, log)
  return servers.start_engine(os.path.join(folder, 'run', 'weights'), port, log)


def _start_trainer(folder, port, updates):
  values = {
      'kind': 'vllm' if _PYTHON.value else 'stppo',
      'address': f'http://127.0.0.1:{port}',
      'folder': folder,
      'staleness': _STALENESS.value,
  }
  settings = [setting.format(**values) for setting in _SMALL] + [f'train.updates={updates}']
  command = [sys.executable, 'run.py', '--config=experiments/st_ppo_tiny.py:smoke']
  command += [f'--workdir={folder}/run', *(f'--config.{setting}' for setting in settings)]
  with open(os.path.join(folder, 'trainer.log'), 'ab') as file:
    return subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file, start_new_session=True)


def _wait_for_update(workdir, update, trainer):
  """Waits until so many updates are done. A trainer that ends by itself ends the benchmark."""
  while _num_updates(workdir) < update:
    if trainer.poll() is not None:
      with open(f'{os.path.dirname(workdir)}/trainer.log', encoding='utf-8') as file:
        sys.exit(f'benchmarks.engine_kills: the trainer ended by itself: {file.read()[-2000:]}')
    time.sleep(0.05)


def _num_updates(workdir):
  """Returns the largest update in metrics.jsonl."""
  path = os.path.join(workdir, 'metrics.jsonl')
  if not os.path.exists(path):
    return 0
  with open(path, encoding='utf-8') as file:
    lines = [line for line in file if line.endswith('\n')]
  return max((json.loads(line)['step'] for line in lines), default=0)


def _kill(process):
  """Kills a process, with its children."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


if __name__ == '__main__':
  app.run(main)
