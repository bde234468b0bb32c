"""Kills the processes of a run at random with kill -9: no question may be lost or played twice.

  python -m benchmarks.engine_kills --kills=20 --staleness=2
  python -m benchmarks.engine_kills --kills=20 --moving
  python -m benchmarks.engine_kills --kills=20 --python=VENV/bin/python    # vLLM as the engines
  python -m benchmarks.engine_kills --kills=20 --env_servers=2 --store

A run on 24 questions, 8 per update, is sampled by engines and evaluated after every second update.
At random moments the trainer, an engine, or the trainer and an engine are killed and started again.
A moment may lie before the first update, in a resume or in the start check. A trainer that ends by
itself is started again, as the cluster recipes do, and counted. With --moving the trainer reads the
addresses in a file: a killed engine is struck off and comes back at another port. With
--env_servers the environment is served by as many processes, and with --store the checkpoints are
in a bucket of fake-gcs-server. One of these may be killed, too. A restarted trainer then waits 90 s
for the lease of the killed one. Prints a row per kill, and at the end a JSON line:

  lost      questions that no update of a complete epoch has played, summed over the epochs
  doubled   records beyond the first of a question in an epoch, the last epoch included
  uneven    updates that do not have 8 records
  failed    episodes whose environment server was killed: recorded, and masked in the loss
"""

import collections
from collections.abc import Collection
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
from typing import Any

from absl import app
from absl import flags

from benchmarks import servers
from stppo_jax.data import tasks as tasks_lib
from stppo_jax.models import convert
from stppo_jax.rollout import prepare
from tests.support import object_store

_KILLS = flags.DEFINE_integer('kills', 20, 'how often')
_ENGINES = flags.DEFINE_integer('engines', 2, 'how many')
_STALENESS = flags.DEFINE_integer('staleness', 2, 'config.pipeline.staleness')
_SEED = flags.DEFINE_integer('kill_seed', 0, 'of the moments')
_MOVING = flags.DEFINE_bool('moving', False, 'engines come back at other addresses')
_ENV_SERVERS = flags.DEFINE_integer(
    'env_servers', 0, 'how many; 0: the trainer has the environment'
)
_STORE = flags.DEFINE_bool('store', False, 'checkpoints in a bucket')
_PYTHON = flags.DEFINE_string('python', '', 'Python with vLLM; empty: our gateway is the engine')
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
QUESTIONS = 24
EPISODES = 8  # per update
_SMALL = (
    f'train.episodes={EPISODES}',
    'train.mini_batch=4',
    'train.epochs=1',
    'train.schedule_updates=10000',
    'train.checkpoint_every=1',
    'eval.every=2',
    'eval.episodes=8',
    'log.tensorboard=False',
    'data.datasets=()',
    'rollout.engine_kind={kind}',
    'rollout.engine={addresses}',
    'data.source={folder}/data',
    'data.corpus=embedded',
    'pipeline.staleness={staleness}',
)


def main(unused_argv):
  with tempfile.TemporaryDirectory() as folder:
    questions = _write_questions(folder)
    result = kill_at_random(folder, questions)
  print(json.dumps(result), flush=True)
  return 0 if not (result['lost'] or result['doubled'] or result['uneven']) else 1


def kill_at_random(folder: str, questions: Collection[str]) -> dict[str, Any]:
  """Runs, kills and finishes; returns the counts."""
  rng = random.Random(_SEED.value)
  workdir = os.path.join(folder, 'run')
  ports = [servers.free_port() for _ in range(_ENGINES.value)]
  engines = [_start_engine(folder, port) for port in ports]
  env_ports = [servers.free_port() for _ in range(_ENV_SERVERS.value)]
  env_servers = [_start_env_server(folder, port) for port in env_ports]
  targets = ['trainer', 'engine', 'trainer and engine']
  settings = []
  store = None
  if env_servers:
    targets.append('environment server')
    settings.append(f'env.kind=openenv:{",".join(_addresses(env_ports))}')
  if _STORE.value:
    store = object_store.Store(os.path.join(folder, 'objects'))
    store.start()
    os.environ.update(store.environment)  # trainers inherit them
    targets.append('store')
    settings.append('train.checkpoint_folder=gs://bucket/run')
  trainer = None
  num_ends = 0
  began = time.monotonic()
  print('| kill | second | processes | updates done | a save or push in progress |', flush=True)
  print('|--:|--:|---|--:|---|', flush=True)
  try:
    for engine, port in zip(engines, ports):
      servers.wait_until_healthy(engine, port)
    for server, port in zip(env_servers, env_ports):
      servers.wait_until_healthy(server, port)
    _list(folder, ports)
    trainer = _start_trainer(folder, ports, updates=10_000, more=settings)
    for kill in range(1, _KILLS.value + 1):
      deadline = time.monotonic() + rng.uniform(0, 15)
      least_updates = rng.choice([0, _num_updates(workdir) + 1])
      while time.monotonic() < deadline or _num_updates(workdir) < least_updates:
        if trainer.poll() is not None:
          num_ends += 1
          reason = _end_of_log(folder).strip().splitlines()[-1]
          print(
              f'| | {round(time.monotonic() - began)} | trainer ended: {reason} | | |', flush=True
          )
          _check_ends(folder, num_ends)
          trainer = _start_trainer(folder, ports, updates=10_000, more=settings)
        time.sleep(0.05)
      target = rng.choice(targets)
      number = rng.randrange(len(engines))
      writes = glob.glob(f'{workdir}/checkpoints/*tmp*') + glob.glob(
          f'{workdir}/weights/*/*.partial'
      )
      names = target.replace('engine', f'engine {number}')
      if target == 'environment server':
        number = rng.randrange(len(env_servers))
        names += f' {number}'
      row = (kill, round(time.monotonic() - began), names, _num_updates(workdir), bool(writes))
      print('| ' + ' | '.join(map(str, row)) + ' |', flush=True)
      if 'trainer' in target:
        _kill(trainer)
      if 'engine' in target:
        _kill(engines[number])
        if _MOVING.value:
          _list(folder, ports[:number] + ports[number + 1 :])
          ports[number] = servers.free_port()
        time.sleep(rng.uniform(0, 3))
        engines[number] = _start_engine(folder, ports[number])
        _list(folder, ports)
      if target == 'environment server':
        _kill(env_servers[number])
        time.sleep(rng.uniform(0, 3))
        env_servers[number] = _start_env_server(folder, env_ports[number])
      if store is not None and target == 'store':
        store.stop_for(rng.uniform(0, 10))
      if 'trainer' in target:
        trainer = _start_trainer(folder, ports, updates=10_000, more=settings)
    _kill(trainer)
    for engine, port in zip(engines, ports):
      servers.wait_until_healthy(engine, port)
    updates = _num_updates(workdir) + 4  # the last epoch is incomplete as a rule
    trainer = _start_trainer(folder, ports, updates, more=settings)
    if trainer.wait():
      sys.exit(f'benchmarks.engine_kills: the last run failed: {_end_of_log(folder)}')
  finally:
    for process in (*engines, *env_servers):
      _kill(process)
    if trainer is not None:
      _kill(trainer)
    if store is not None:
      store.stop()
  counts = count(workdir, updates, questions)
  setting = {'benchmark': 'engine_kills', 'kills': _KILLS.value, 'moving': _MOVING.value}
  return setting | {'ends': num_ends} | counts


def count(workdir: str, updates: int, questions: Collection[str]) -> dict[str, int]:
  """Returns how many questions of the records were lost, or played twice in an epoch.

  An epoch consists of fixed updates, so a record that is missing does not shift later ones.
  """
  updates_per_epoch = QUESTIONS // EPISODES
  epochs: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
  uneven = 0
  failed = 0
  for update in range(1, updates + 1):
    path = os.path.join(workdir, 'episodes', f'train_{update:06d}.jsonl')
    with open(path, encoding='utf-8') as file:
      records = [json.loads(line) for line in file]
    played = [record['task'] for record in records]
    failed += sum(record['failed'] for record in records)
    epochs[(update - 1) // updates_per_epoch].update(played)
    uneven += len(played) != EPISODES
  num_complete = updates // updates_per_epoch
  lost = 0
  doubled = 0
  for epoch, times in epochs.items():
    doubled += times.total() - len(times)
    if epoch < num_complete:
      lost += len(set(questions) - set(times))
  return {
      'updates': updates,
      'epochs': num_complete,
      'lost': lost,
      'doubled': doubled,
      'uneven': uneven,
      'failed': failed,
  }


def _write_questions(folder):
  """Writes some of the embedded questions, and the model for vLLM; returns the questions' ids."""
  ids = []
  os.makedirs(os.path.join(folder, 'data'))
  with open(os.path.join(folder, 'data', 'qa.jsonl'), 'w', encoding='utf-8') as file:
    for split, number in (('train', QUESTIONS), ('dev', 8)):
      for task in tasks_lib.load_tasks('embedded', split)[:number]:
        fields = {'id': task.id, 'question': task.question, 'answers': list(task.answers)}
        if split == 'train':
          ids.append(task.id)
        file.write(json.dumps(fields | {'split': split, 'dataset': task.dataset}) + '\n')
  shape, params = convert.load_hf(prepare.EMBEDDED_MODEL)
  model = os.path.join(folder, 'model')
  convert.save_hf(model, shape, params, prepare.EMBEDDED_MODEL)
  return ids


def _addresses(ports):
  return [f'http://127.0.0.1:{port}' for port in ports]


def _list(folder, ports):
  """Writes the addresses for a trainer that looks them up."""
  path = os.path.join(folder, 'engines')
  with open(f'{path}.partial', 'w', encoding='utf-8') as file:
    file.writelines(f'{address}\n' for address in _addresses(ports))
  os.replace(f'{path}.partial', path)


def _start_engine(folder, port):
  log = os.path.join(folder, 'engine.log')
  if _PYTHON.value:
    return servers.start_vllm(_PYTHON.value, os.path.join(folder, 'model'), port, log)
  return servers.start_engine(os.path.join(folder, 'run', 'weights'), port, log)


def _start_env_server(folder, port):
  command = [sys.executable, 'run.py', 'env-server', 'search', f'--port={port}']
  command += ['--config=experiments/st_ppo_tiny.py:smoke', '--config.data.corpus=embedded']
  with open(os.path.join(folder, 'env_server.log'), 'ab') as file:
    return subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file, start_new_session=True)


def _start_trainer(folder, ports, updates, more=()):
  values = {
      'kind': 'vllm' if _PYTHON.value else 'stppo',
      'addresses': f'file:{folder}/engines' if _MOVING.value else ','.join(_addresses(ports)),
      'folder': folder,
      'staleness': _STALENESS.value,
  }
  settings = [setting.format(**values) for setting in _SMALL]
  settings += [f'train.updates={updates}', *more]
  command = [sys.executable, 'run.py', '--config=experiments/st_ppo_tiny.py:smoke']
  command += [f'--workdir={folder}/run', *(f'--config.{setting}' for setting in settings)]
  with open(os.path.join(folder, 'trainer.log'), 'ab') as file:
    return subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file, start_new_session=True)


def _check_ends(folder, num_ends):
  """Ends the benchmark if the trainer has ended by itself more often than it was hindered."""
  if num_ends > _KILLS.value:
    sys.exit(f'benchmarks.engine_kills: the trainer ended by itself: {_end_of_log(folder)}')


def _end_of_log(folder):
  with open(os.path.join(folder, 'trainer.log'), encoding='utf-8') as file:
    return file.read()[-2000:]


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
