"""A cluster on this machine, for the recipes: nodes are addresses of loopback, and names of hosts
are looked up in a table.

Each node has its own address, so that several of them listen on the same port. Programs of the
recipes are found first in a folder of stand-ins: vLLM, `srun`, `scontrol` and `gcloud`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pyarrow
from pyarrow import parquet

from tests.support import tiny_run

ROOT = pathlib.Path(__file__).parent.parent.parent
DEVICES = 2  # each trainer process has them

EXPERIMENT = """
from tests.support import tiny_run

def get_config(mode=''):
  config = tiny_run.make_config({shared!r})
  config.data.eval_split = 'test'
  config.retriever.kind = 'http'
  config.retriever.dialect = 'search_r1'
  config.rollout.engine_gap = 100.0  # the stand-in does not compute with the weights
  config.train.mini_batch = 16
  config.train.micro_batch = 0  # follows the devices, as in the recipes
  config.train.updates = {updates}
  config.eval.every = 0
  return config
"""
# Python imports it at its start. It looks names up as the name server of a cluster does. The
# addresses of nodes are not those of loopback for servers, which then answer to all names.
NAMES = """
import ipaddress, json, os, socket
ipaddress.IPv4Address.is_loopback = property(lambda address: str(address).startswith('127.0.0.'))
_look_up = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
  with open(os.environ['CLUSTER_NAMES'], encoding='utf-8') as file:
    addresses = json.load(file).get(host, [host])
  return [found for address in addresses for found in _look_up(address, *args, **kwargs)]
socket.getaddrinfo = getaddrinfo
"""
# Starts a process per task with the variables that SLURM gives to it.
SRUN = """#!{python}
import os, signal, subprocess, sys
options, command = dict(), sys.argv[1:]
while command[0].startswith('--'):
  name, _, value = command.pop(0).partition('=')
  options[name] = value
hosts = options['--nodelist'].split(',')
assert len(hosts) == int(options['--nodes']) == int(options['--ntasks']), options
tasks = []
for number, host in enumerate(hosts):
  step = dict(
      SLURM_STEP_NODELIST=options['--nodelist'],
      SLURM_NTASKS=str(len(hosts)),
      SLURM_PROCID=str(number),
      SLURM_LOCALID='0',
  )
  here = [word.replace('0.0.0.0', host) for word in command]
  tasks.append(subprocess.Popen(here, env=dict(os.environ, **step), start_new_session=True))
  with open(os.environ['CLUSTER_TASKS'], 'a', encoding='utf-8') as file:
    print(tasks[-1].pid, file=file)
def end(signum, frame):
  for task in tasks:
    if task.poll() is None:
      os.killpg(task.pid, signum)
signal.signal(signal.SIGTERM, end)
sys.exit(max(abs(task.wait()) for task in tasks))
"""
# `show hostnames a,b` prints a line for each node.
SCONTROL = """#!/bin/sh
echo "$3" | tr , '\\n'
"""
# Runs the command on one host or on all hosts of a TPU, as `srun` does.
GCLOUD = """#!{python}
import json, os, sys
options = dict(word.partition('=')[::2] for word in sys.argv[1:] if word.startswith('--'))
tpu = sys.argv[5]
with open(os.environ['CLUSTER_NAMES'], encoding='utf-8') as file:
  names = json.load(file)
hosts = names[tpu]
# A port of its own for JAX: all hosts are this machine.
os.environ['SLURM_JOB_ID'] = str(int(os.environ['SLURM_JOB_ID']) + list(names).index(tpu))
if sys.argv[4] == 'describe':
  print(hosts[0])
  sys.exit()
if options['--worker'] != 'all':
  hosts = [hosts[int(options['--worker'])]]
os.execvp('srun', [
    'srun', f'--nodes={{len(hosts)}}', f'--ntasks={{len(hosts)}}', '--nodelist=' + ','.join(hosts),
    'bash', '-c', options['--command'],
])
"""


class Cluster:
  """The nodes of a test, and the folder that all of them see.

  `home`/stppo has run.py and small experiments under the names of the real ones. `shared` has a
  model, questions and passages of `tiny_run` under the names of the recipes.
  """

  def __init__(self, folder: str):
    self.folder = pathlib.Path(folder)
    self.home = self.folder / 'home'
    self.repo = self.home / 'stppo'
    self.shared = self.folder / 'shared'
    self.programs = self.folder / 'bin'
    self.names: dict[str, list[str]] = {}
    self._network = f'127.{random.randrange(16, 250)}.{random.randrange(250)}'
    self._nodes = 0
    self._processes: list[subprocess.Popen] = []
    for path in (self.repo / 'experiments', self.shared, self.programs, self.folder / 'site'):
      path.mkdir(parents=True)
    self._write_shared()
    self._write_programs()
    self.write_experiments(updates=2)

  def _write_shared(self) -> None:
    tiny_run.write(str(self.shared))
    for name in ('Qwen2.5-7B', 'Qwen2.5-0.5B'):
      shutil.copytree(self.shared / 'model', self.shared / 'models' / name)
    (self.shared / 'data').mkdir()
    (self.shared / 'corpus').symlink_to(self.shared / 'knowledge')
    for split in ('train', 'test'):
      rows = [
          {
              'id': f'{split}_{number}',
              'question': f'Which colour has {thing}?',
              'golden_answers': [colour],
              'data_source': 'nq',
              'extra_info': {'split': split, 'index': number},
          }
          for number, (thing, colour) in enumerate(tiny_run.COLOURS.items())
      ]
      path = self.shared / 'data' / f'{split}.parquet'
      parquet.write_table(pyarrow.Table.from_pylist(rows), path)

  def _write_programs(self) -> None:
    (self.folder / 'site' / 'sitecustomize.py').write_text(NAMES, encoding='utf-8')
    (self.repo / 'run.py').symlink_to(ROOT / 'run.py')
    python = f'exec {sys.executable}'
    vllm = f'{python} {ROOT}/tests/support/vllm_stand_in.py "${{@:3}}"'  # after -m MODULE
    for name, text in {
        'stppo': f'#!/bin/bash\n{python} {ROOT}/run.py "$@"\n',
        'python': f'#!/bin/bash\n{python} "$@"\n',
        'python3': f'#!/bin/bash\n[ "$1" = -m ] || {python} "$@"\n{vllm}\n',
        'srun': SRUN.format(python=sys.executable),
        'scontrol': SCONTROL,
        'gcloud': GCLOUD.format(python=sys.executable),
        'pkill': '#!/bin/sh\n',  # it would find processes of others; `stop` ends the tasks
    }.items():
      path = self.programs / name
      path.write_text(text, encoding='utf-8')
      path.chmod(0o755)

  def write_experiments(self, updates: int) -> None:
    """Writes the small experiments."""
    text = EXPERIMENT.format(shared=str(self.shared), updates=updates)
    for name in ('st_ppo_7b', 'grpo_7b'):
      path = self.repo / 'experiments' / f'{name}.py'
      path.write_text(text, encoding='utf-8')

  def add_node(self, *names: str) -> str:
    """Returns the address of a new node, which has these names."""
    self._nodes += 1
    address = f'{self._network}.{self._nodes}'
    for name in names:
      self.names.setdefault(name, []).append(address)
    (self.folder / 'names.json').write_text(json.dumps(self.names), encoding='utf-8')
    return address

  def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen:
    """Starts a command in `repo`. Its output is in the file that the attribute `log` names."""
    environment = {
        **os.environ,
        'PATH': f'{self.programs}:{os.environ["PATH"]}',
        'HOME': str(self.home),
        'PYTHONPATH': f'{self.folder / "site"}:{ROOT}',
        'CLUSTER_NAMES': str(self.folder / 'names.json'),
        'CLUSTER_TASKS': str(self.folder / 'tasks'),
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={DEVICES}',
        **variables,
    }
    path = self.folder / f'log_{len(self._processes)}'
    with open(path, 'w', encoding='utf-8') as log:
      process = subprocess.Popen(
          command, cwd=self.repo, env=environment, stdout=log, stderr=log, start_new_session=True
      )
    process.log = path
    self._processes.append(process)
    return process

  def stop(self) -> None:
    """Ends all processes that are left. The tasks of `srun` have their own groups, too."""
    for process in self._processes:
      process.terminate()  # scripts end what they started
    for process in self._processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
      end_group(process.pid)
      process.wait()
    tasks = self.folder / 'tasks'
    if tasks.exists():
      for task in tasks.read_text(encoding='utf-8').split():
        end_group(int(task))

  def logs(self) -> str:
    """Returns the ends of the outputs of all processes."""
    return '\n'.join(
        f'== {process.args}\n{process.log.read_text(encoding="utf-8")[-3000:]}'
        for process in self._processes
    )

  def wait_for(self, is_true: Callable[[], bool], running: Sequence[subprocess.Popen]) -> None:
    """Waits until a condition is true. AssertionError: a process ended, or ten minutes passed."""
    deadline = time.monotonic() + 600
    while not is_true():
      assert time.monotonic() < deadline, self.logs()
      assert all(process.poll() is None for process in running), self.logs()
      time.sleep(0.2)


def end_group(group: int) -> None:
  """Ends the processes of a group, if there are any."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(group, signal.SIGKILL)


def answers(url: str) -> bool:
  """Whether a server answers a GET with success."""
  try:
    with urllib.request.urlopen(url, timeout=5):
      return True
  except OSError:
    return False


def free_port() -> int:
  """Returns a port at which nobody listens. It is one of those that JAX takes under SLURM."""
  while True:
    with socket.socket() as bound:
      try:
        bound.bind(('', random.randrange(61440, 65536)))
      except OSError:
        continue
      return bound.getsockname()[1]


def fill_in(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
  """Returns the words of a command with texts replaced."""
  result = []
  for word in words:
    for text, value in values.items():
      word = word.replace(text, value)
    result.append(word)
  return result
