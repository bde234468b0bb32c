"""Environments in this process compared with four environment servers, and idle sessions.

  python -m benchmarks.env_servers

The first line has 64 episodes whose steps compute 50 ms in Python, beside as many whose steps wait
for 500 ms. `ratio` is the time in this process over the time with the servers, and `spread` its
smallest and largest value in the repeats. The second line has the memory of a server with 2,000
idle sessions. Needs the extras `serve` and `openenv`, and an idle machine: `load` is its load at
the start.
"""

import asyncio
from concurrent import futures
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time

from absl import app
from absl import flags

from benchmarks import servers
from stppo_jax.envs import factory as factory_lib
from stppo_jax.envs import stepping
from stppo_jax.envs.adapters import openenv
from stppo_jax.types import Task

_EPISODES = flags.DEFINE_integer('episodes', 64, 'that compute')
_WAITING = flags.DEFINE_integer('waiting', 64, 'episodes that wait')
_STEPS = flags.DEFINE_integer('steps', 2, 'of each episode')
_SERVERS = flags.DEFINE_integer('servers', 4, 'environment servers')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'of both sides, in turn')
_IDLE = flags.DEFINE_integer('idle', 2000, 'sessions')
_COMPUTE_S = 0.05
_WAIT_S = 0.5
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Works:
  """An environment whose step computes, or waits for something else."""

  uses_global_random = False

  def __init__(self, task):
    self._waits = task.question == 'wait'

  def reset(self, seed=None):
    """Starts an episode."""
    return str(seed), {}

  def step(self, action):
    """Uses the processor for 50 ms, whatever else runs on it, or waits for 500 ms."""
    if self._waits:
      time.sleep(_WAIT_S)
    else:
      end = time.thread_time() + _COMPUTE_S
      while time.thread_time() < end:
        sum(range(1000))
    return action, 0.0, False, False, {}


def main(unused_argv):
  load = os.getloadavg()[0]
  with contextlib.ExitStack() as stack:
    starts = [start_server() for _ in range(_SERVERS.value)]
    processes = [stack.enter_context(servers.ended(start)) for start in starts]
    urls = list(map(read_url, processes))
    here = factory_lib.make_factory('Works', Works, {}, {})
    there = factory_lib.make_factory('Works', openenv.make(','.join(urls)), {}, {})
    here_s = []
    there_s = []
    for _ in range(_REPEATS.value):
      here_s.append(play(here))
      there_s.append(play(there))
  ratios = [one / other for one, other in zip(here_s, there_s)]
  figure = {
      'figure': f'{_EPISODES.value} episodes that compute beside {_WAITING.value} that wait',
      'servers': _SERVERS.value,
      'cpus': len(os.sched_getaffinity(0)),
      'load': round(load, 1),
      'here_s': round(statistics.median(here_s), 2),
      'servers_s': round(statistics.median(there_s), 2),
      'ratio': round(statistics.median(ratios), 2),
      'spread': [round(min(ratios), 2), round(max(ratios), 2)],
  }
  print(json.dumps(figure), flush=True)
  with servers.ended(start_server()) as process:
    print(json.dumps(measure_idle(process, read_url(process))), flush=True)


def play(factory) -> float:
  """Plays all episodes, one step of each after the other; returns the seconds of the steps."""
  kinds = ['compute'] * _EPISODES.value + ['wait'] * _WAITING.value
  envs = [factory(Task(str(seed), kind), seed) for seed, kind in enumerate(kinds)]
  with futures.ThreadPoolExecutor(len(envs)) as pool:
    list(pool.map(stepping.reset, envs, range(len(envs))))
    started = time.perf_counter()
    for _ in range(_STEPS.value):
      outcomes = stepping.step_all(envs, ['x'] * len(envs), pool.map)
      assert all(outcome[0] == 'x' for outcome in outcomes), outcomes
    return time.perf_counter() - started


def start_server() -> subprocess.Popen:
  """Starts an environment server on any free port."""
  command = [sys.executable, 'run.py', 'env-server', 'benchmarks.env_servers:Works', '--port=0']
  return subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True)


def read_url(process: subprocess.Popen) -> str:
  """Returns the address that a server logs."""
  for line in process.stderr:
    if match := re.search(r'--config\.env\.kind=openenv:(\S+)', line):
      return match[1]
  raise SystemExit('the server has not started')


def measure_idle(process: subprocess.Popen, url: str) -> dict[str, object]:
  """Returns the memory of a server without sessions, and with idle ones that were reset."""
  empty_mib = memory_mib(process)
  asyncio.run(hold_sessions(url, 1))  # what the first session loads
  started_mib = memory_mib(process)
  full_mib = asyncio.run(hold_sessions(url, _IDLE.value, lambda: memory_mib(process)))
  return {
      'figure': f'{_IDLE.value} idle sessions',
      'empty_mib': round(empty_mib, 1),
      'after_a_session_mib': round(started_mib, 1),
      'full_mib': round(full_mib, 1),
      'kib_per_session': round((full_mib - started_mib) * 1024 / _IDLE.value, 1),
  }


async def hold_sessions(url: str, number: int, measure=lambda: 0.0) -> float:
  """Opens sessions, resets each and returns what `measure` gives while all are open."""
  from websockets.asyncio import client

  address = url.replace('http', 'ws', 1) + '/ws'
  async with contextlib.AsyncExitStack() as stack:
    for seed in range(number):
      connection = client.connect(address, proxy=None, open_timeout=60, compression=None)
      socket = await stack.enter_async_context(connection)
      await socket.send(json.dumps({'type': 'reset', 'data': {'seed': seed}}))
      assert json.loads(await socket.recv())['type'] == 'observation'
    return measure()


def memory_mib(process: subprocess.Popen) -> float:
  """Returns the resident memory of a process."""
  with open(f'/proc/{process.pid}/statm', encoding='ascii') as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


if __name__ == '__main__':
  app.run(main)
