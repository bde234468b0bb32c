"""Speed of this tree compared with another checkout of the project.

  git worktree add /tmp/old COMMIT
  python -m benchmarks.trees --base=/tmp/old     # update, log-probs, sampling, gateway
  python -m benchmarks.trees --base=/tmp/old --parts=update

Both trees run their own code in their own process, in turn, with the same model, batch and CPU. The
gateways have all CPUs, and 16 clients each send 32 prompts, one after the other. A figure is a
JSON line as in the other benchmarks; its peer is the other tree. `ratio` above 1 means that this
tree is faster.
"""

from concurrent import futures
import contextlib
import tempfile
import time

from absl import app
from absl import flags
import numpy as np
import requests

from benchmarks import figures
from benchmarks import servers
from benchmarks import side_by_side

_BASE = flags.DEFINE_string('base', None, 'folder of the other checkout', required=True)
_PARTS = flags.DEFINE_list('parts', ['update', 'rollout', 'gateway'], 'which')
_SIZE = flags.DEFINE_string('size', '0.94M', 'of 0.94M, 2.9M, 20M, 47M')

ROWS, LENGTH, MICRO_BATCH = 32, 192, 8
PROMPT, NEW, TURNS, OBSERVED = 64, 32, 4, 32
CLIENTS, REQUESTS = 16, 32
GATEWAY = ('--config.name=tiny', '--config.serve.rows=16', '--config.serve.max_total=256')


def main(unused_argv):
  side_by_side.print_machine()
  with tempfile.TemporaryDirectory() as folder:
    if 'update' in _PARTS.value:
      arguments = ('Learning', _SIZE.value, folder, ROWS, LENGTH, 1e-5, MICRO_BATCH)
      calls = {
          f'update, {ROWS} x {LENGTH}': ('update', 'st_ppo, clipped'),
          f'log-probs and values, {ROWS} x {LENGTH}': ('log_probs',),
      }
      compare('update', arguments, calls, ROWS * LENGTH)
    if 'rollout' in _PARTS.value:
      rng = np.random.default_rng(0)
      prompts = rng.integers(1, 500, (ROWS, PROMPT))
      observations = rng.integers(1, 500, (TURNS - 1, ROWS, OBSERVED))
      calls = {f'{TURNS} turns of {ROWS} rows': ('multi_turn', prompts, observations, NEW)}
      compare('rollout', ('Sampling', _SIZE.value, folder), calls, ROWS * TURNS * NEW)
    if 'gateway' in _PARTS.value:
      compare_gateways()


def compare(benchmark, arguments, calls, num_tokens):
  """Prints a figure per call; `arguments` make the object of `benchmarks.ours` in each tree."""
  workers = {
      'this': side_by_side.Worker(1, 'benchmarks.ours', *arguments),
      'base': side_by_side.Worker(1, 'benchmarks.ours', *arguments, root=_BASE.value),
  }
  for what, call in calls.items():
    jobs = {name: (worker, *call) for name, worker in workers.items()}
    found = side_by_side.measure(jobs, num_tokens, side_by_side.REPEATS.value, warmups=1)
    figures.report(benchmark, what, _SIZE.value, 1, found['this'], 'base', found['base'])
  for worker in workers.values():
    worker.close()


def compare_gateways():
  """Prints the tokens per second that clients get from the gateway of each tree."""
  num_tokens = CLIENTS * REQUESTS * NEW
  with contextlib.ExitStack() as stack:
    roots = {'this': str(side_by_side.ROOT), 'base': _BASE.value}
    ports = {
        name: stack.enter_context(servers.gateway(*GATEWAY, root=root))[0]
        for name, root in roots.items()
    }
    speeds = {name: [] for name in ports}
    for repeat in range(side_by_side.REPEATS.value + 1):
      for name, port in ports.items():
        start = time.perf_counter()
        with futures.ThreadPoolExecutor(CLIENTS) as clients:
          for _ in clients.map(lambda client, port=port: _ask(port, client), range(CLIENTS)):
            pass
        seconds = time.perf_counter() - start
        if repeat:  # the first one compiles
          speeds[name].append(num_tokens / seconds)
  this, base = np.array(speeds['this']), np.array(speeds['base'])
  line = {
      'benchmark': 'gateway',
      'what': f'{CLIENTS} clients, {REQUESTS} completions each',
      'ours_tokens_per_s': round(np.median(this)),
      'peer_tokens_per_s': round(np.median(base)),
      'ratio': round(np.median(this / base), 3),
      'spread': figures.min_max(this / base),
      'repeats': len(this),
  }
  figures.print_line(line)


def _ask(port, client):
  """Sends a client's prompts, and checks that all tokens come."""
  with requests.Session() as session:
    for number in range(REQUESTS):
      request = {
          'model': 'tiny',
          'prompt': f'Question: {client} times {number}?\n',
          'max_tokens': NEW,
          'ignore_eos': True,
      }
      answer = session.post(f'http://127.0.0.1:{port}/v1/completions', json=request, timeout=120)
      answer.raise_for_status()
      if answer.json()['usage']['completion_tokens'] != NEW:
        raise RuntimeError(f'not {NEW} tokens: {answer.text}')


if __name__ == '__main__':
  app.run(main)
