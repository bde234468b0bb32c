"""Conversations per second of `run.py sft`, compared with another checkout of the project.

  git worktree add /tmp/old COMMIT
  python -m benchmarks.sft --base=/tmp/old

Both trees train the embedded model on the same conversations, in turn, with the default buckets and
at most 32 bins: with 64, the default, c7178731 takes 27 GB. A figure is the difference between a
long and a short training, so that start and compilation do not count.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import numpy as np

_BASE = flags.DEFINE_string('base', None, 'folder of the other checkout', required=True)
_MEANS = flags.DEFINE_list('means', ['144', '383', '872'], 'mean tokens of a conversation')
_REPEATS = flags.DEFINE_integer('repeats', 2, 'measurements of each tree')

HERE = pathlib.Path(__file__).parent.parent
BATCH = 32  # conversations per step
STEPS = {'this': (2, 34), 'base': (2, 6)}  # a short and a long training of some minutes


def main(unused_argv):
  roots = {'this': HERE, 'base': pathlib.Path(_BASE.value)}
  with tempfile.TemporaryDirectory() as folder:
    for mean in map(int, _MEANS.value):
      rates = {name: [] for name in roots}
      for number in range(_REPEATS.value + 1):  # the first one fills the compilation cache
        for name, root in roots.items():
          short, long = STEPS[name]
          seconds = [run(root, mean, steps, folder) for steps in (short, long)]
          if number:
            rates[name].append(BATCH * (long - short) / (seconds[1] - seconds[0]))
      this, base = map(sorted, rates.values())
      line = {
          'benchmark': 'sft',
          'mean_tokens': mean,
          'conversations_per_s': this,
          'base': base,
          'ratio': [this[0] / base[-1], this[-1] / base[0]],
      }
      print(json.dumps(line), flush=True)


def write_conversations(path: str, mean: int, steps: int) -> None:
  """Writes the conversations of some steps. Their lengths are log-normal around `mean` tokens."""
  rng = np.random.default_rng(0)
  with open(path, 'w', encoding='utf-8') as file:
    for length in rng.lognormal(np.log(mean) - 0.18, 0.6, BATCH * steps):
      text = ' the' * int(np.clip(length - 40, 1, 3800))
      turns = [('user', 'Question: what is it?\n'), ('assistant', f'<answer>{text}</answer>')]
      messages = [{'role': role, 'content': content} for role, content in turns]
      file.write(json.dumps({'messages': messages}) + '\n')


def run(root: pathlib.Path, mean: int, steps: int, folder: str) -> float:
  """Returns the seconds of a training."""
  path = os.path.join(folder, f'{mean}_{steps}.jsonl')
  write_conversations(path, mean, steps)
  workdir = tempfile.mkdtemp(dir=folder)
  command = [
      sys.executable,
      'run.py',
      'sft',
      f'--config.data.source={path}',
      '--config.sft.epochs=1',
      f'--config.sft.batch={BATCH}',
      '--config.sft.held_out=0.0',
      '--config.rollout.max_total=4096',
      '--config.train.length_buckets=(1024,2048,4096)',
      '--config.train.episodes=32',
      '--config.train.mini_batch=32',
      '--config.train.micro_batch=32',
      f'--workdir={workdir}',
  ]
  cache = {'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache'}
  started = time.perf_counter()
  result = subprocess.run(command, cwd=root, capture_output=True, text=True, env=os.environ | cache)
  if result.returncode:
    raise RuntimeError(f'{root}: {result.stderr[-2000:]}')
  return time.perf_counter() - started


if __name__ == '__main__':
  app.run(main)
