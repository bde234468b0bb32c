"""Prime Intellect's environments: `env.kind='verifiers:TASKSET'`.

An episode is played by verifiers' own harness, whose model is the gateway. So the environment is an
agent program here. verifiers runs in one process for all episodes, see verifiers_worker.py. Its
Python may be another one, because its dependencies need not fit the trainer's.
"""

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from typing import Any
import weakref

from stppo_jax import types
from stppo_jax.envs import commands
from stppo_jax.envs import factory
from stppo_jax.envs import program as program_lib
from stppo_jax.envs import rewards

_WORKER = os.path.join(os.path.dirname(__file__), 'verifiers_worker.py')
_END_S = 15.0  # verifiers' time to end its harnesses
_MAX_SHOWN = 500  # characters of an error


class EpisodeError(Exception):
  """verifiers reports that an episode has failed."""


@dataclasses.dataclass(frozen=True)
class Settings:
  """What `env.options` may hold."""

  python: str = sys.executable  # an interpreter that has verifiers
  taskset: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of the taskset
  # Settings with which the evaluation differs, such as {'split': 'test'}. None: the evaluation has
  # each tenth task, and the training has the others.
  eval_taskset: Mapping[str, Any] | None = None
  # Other settings of verifiers' EnvConfig: agents with harness and runtime.
  env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_tasks: int = 10_000  # tasks that are read; a taskset may have no end


class VerifiersProcess:
  """The process that has verifiers. It starts with the first call. Safe to use from threads."""

  def __init__(self, kind: str, settings: Settings):
    self._kind = kind
    self._settings = settings
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None
    self._waiting: dict[int, futures.Future] = {}
    self._numbers = itertools.count()

  def call(self, **fields: Any) -> dict[str, Any]:
    """Returns the answer to a request. EpisodeError: it is an error, or the process has died."""
    answer: futures.Future = futures.Future()
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._start()
      assert self._process is not None and self._process.stdin is not None
      number = next(self._numbers)
      self._waiting[number] = answer
      try:
        self._process.stdin.write(json.dumps({'number': number, **fields}) + '\n')
        self._process.stdin.flush()
      except OSError:  # the reader reports it
        pass
    result = answer.result()
    if 'error' in result:
      raise EpisodeError(result['error'][:_MAX_SHOWN])
    return result

  def _start(self):
    """Starts the process. The lock is held."""
    self._process = subprocess.Popen(
        [self._settings.python, '-P', _WORKER],  # -P: this folder holds a file verifiers.py
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,  # Ctrl-C asks the trainer alone to stop
    )
    weakref.finalize(self, _end, self._process)
    settings = {'id': self._kind.partition(':')[2], **dataclasses.asdict(self._settings)}
    assert self._process.stdin is not None
    self._process.stdin.write(json.dumps(settings) + '\n')
    self._process.stdin.flush()
    self._waiting = {}
    threading.Thread(
        target=_read, args=(self._process, self._waiting, self._lock), daemon=True, name='verifiers'
    ).start()


def _read(process, waiting, lock):
  """Gives answers to those that wait for them, until the process ends."""
  for line in process.stdout:
    answer = json.loads(line)
    waiting.pop(answer['number']).set_result(answer)
  status = process.wait()
  error = f'the process with verifiers has ended ({commands.describe(status)}), see its output'
  with lock:
    while waiting:
      waiting.popitem()[1].set_result({'error': error})


def _end(process):
  """Ends the process and the programs of its harnesses."""
  process.stdin.close()
  try:
    process.wait(_END_S)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


def _environment():
  """Returns the variables of the process. It imports modules of the folder of the run."""
  variables = commands.base_environment()
  paths = filter(None, (variables.get('PYTHONPATH'), os.getcwd()))
  return variables | {'PYTHONPATH': os.pathsep.join(paths)}


class VerifiersProgram(program_lib.Program):
  """An agent program whose `function` asks the worker for an episode."""

  scores_by_itself = True


def make_factory(
    kind: str, options: Mapping[str, Any], reward: rewards.Reward
) -> factory.EnvFactory:
  """Returns the factory of `env.kind`. UserError: an option is wrong, or there is no such Python.

  Nothing is started before tasks are needed.
  """
  given = f'config.env.kind={kind!r}'
  names = [field.name for field in dataclasses.fields(Settings)]
  if unknown := sorted(set(options) - set(names)):
    raise types.UserError(
        f'{given}: there is no option {", ".join(unknown)}; allowed in config.env.options are '
        f'{", ".join(names)}'
    )
  settings = Settings(**options)
  if shutil.which(settings.python) is None:
    raise types.UserError(
        f'{given}: config.env.options.python={settings.python!r} is no program: give a Python that '
        'has the package verifiers'
    )
  worker = VerifiersProcess(kind, settings)

  def load_tasks(split: str) -> list[types.Task]:
    try:
      tasks = worker.call(tasks=split)['tasks']
    except EpisodeError as error:
      raise types.UserError(
          f'{given} gives no tasks ({error}): the Python of config.env.options.python='
          f'{settings.python!r} needs verifiers 0.4 and the package of the taskset'
      ) from error
    if not tasks:
      raise types.UserError(f'{given} has no task of the split {split!r}')
    name = kind.partition(':')[2]
    return [
        types.Task(str(task['index']), task['prompt'], dataset=name, split=split) for task in tasks
    ]

  def play(task: Mapping[str, Any], base_url: str, model: str) -> program_lib.Result:
    result = worker.call(index=int(task['id']), split=task['split'], base_url=base_url, model=model)
    return program_lib.Result(result['reward'], result['metrics'])

  return factory.EnvFactory(
      VerifiersProgram(play, {}, reward), {}, uses_global_random=False, load_tasks=load_tasks
  )
