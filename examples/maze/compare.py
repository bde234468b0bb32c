"""Compares five algorithms on the maze with each other and with the numbers of LMRL-Gym.

  python -m examples.maze.compare --workdir=runs/maze    # the runs that have no record yet
  python -m examples.maze.compare --summary              # tables from the records

Each algorithm is tried at three rates with one seed, and then runs at its best rate with five other
seeds. All runs start from the same policy. A record is appended to research/results/maze.jsonl when
its run has ended. The same command continues after a stop, and repeats the run that was stopped.
Processes with other --methods may run at the same time, one per core.
"""

import argparse
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import numpy as np

from examples.maze import config as maze
from examples.maze import env
from stppo_jax import requirements
from stppo_jax.distributed import malloc
from stppo_jax.evaluation import job as evaluation
from stppo_jax.monitoring import metrics as metrics_lib
from stppo_jax.training import loop

RESULTS = pathlib.Path(__file__).parents[2] / 'research' / 'results' / 'maze.jsonl'
RATES = (1e-4, 3e-4, 1e-3)
SEARCH_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
FIRST = 'first_policy'  # the method of a run without training
# In the order in which they run.
METHODS = (
    ('ppo', 'fully'),
    ('st_ppo', 'fully'),
    ('turn_ppo', 'fully'),
    ('s_ppo', 'fully'),
    ('grpo', 'fully'),
    ('ppo', 'partly'),
    ('st_ppo', 'partly'),
)
NAMES = tuple(dict.fromkeys(method for method, _ in METHODS))
SAMPLES = 16  # episodes from each start in the last evaluation
DRAWS = 10_000  # samples of the bootstrap


@dataclasses.dataclass(frozen=True)
class Job:
  """One run."""

  method: str
  observed: str
  lr: float
  seed: int

  @property
  def name(self) -> str:
    """Returns the name of its folder."""
    return f'{self.observed}_{self.method}_{self.lr:g}_{self.seed}'


def make_config(job: Job):
  """Returns the config of a run."""
  config = maze.get_config('partly' if job.observed == 'partly' else '')
  config.name = job.name
  config.seed = job.seed
  if job.method == FIRST:
    config.train.updates = 0
  else:
    config.algorithm.variant = job.method
    config.algorithm.log_bias = False  # it takes another backward pass
    config.actor.lr = job.lr
  if job.method == 'grpo':
    config.rollout.group_size = 8
    config.train.critic_warmup = 0  # it has no critic
  config.log.episodes = False
  return config


def read_records(path: pathlib.Path = RESULTS) -> dict[Job, dict[str, Any]]:
  """Returns the record of each run that has ended."""
  lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
  records = [json.loads(line) for line in lines]
  return {Job(**record['job']): record for record in records}


def best_rate(records: dict[Job, dict], method: str, observed: str) -> float | None:
  """Returns the rate with the highest return of the search. None: a rate has no record."""
  jobs = search_jobs(method, observed)
  if any(job not in records for job in jobs):
    return None
  return max(jobs, key=lambda job: records[job]['sampled']).lr


def search_jobs(method: str, observed: str) -> list[Job]:
  """Returns the runs that choose the rate."""
  return [Job(method, observed, rate, SEARCH_SEED) for rate in RATES]


def first_jobs() -> list[Job]:
  """Returns the runs that evaluate the first policy."""
  return [Job(FIRST, observed, 0.0, 0) for observed in env.OBSERVED]


def plan(path: pathlib.Path = RESULTS, methods: Collection[str] = NAMES) -> Iterator[Job]:
  """Yields the runs without a record, one by one, because the search decides what follows."""
  for job in first_jobs():
    if job not in read_records(path):
      yield job
  for method, observed in METHODS:
    if method not in methods:
      continue
    for job in search_jobs(method, observed):
      if job not in read_records(path):
        yield job
    rate = best_rate(read_records(path), method, observed)
    for seed in SEEDS:
      job = Job(method, observed, rate, seed)
      if job not in read_records(path):
        yield job


def run(job: Job, workdir: pathlib.Path, path: pathlib.Path = RESULTS) -> None:
  """Trains and evaluates a run, and appends its record."""
  folder = workdir / job.name
  shutil.rmtree(folder, ignore_errors=True)  # what a stop has left
  config = make_config(job)
  started = time.perf_counter()
  loop.start(config, str(folder))
  train_s = time.perf_counter() - started
  rows = metrics_lib.read_metrics(str(folder))
  config.eval.samples = SAMPLES
  results = evaluation.evaluate(config, str(folder))
  greedy = [
      (row['step'], row['val-core/all/return']) for row in rows if 'val-core/all/return' in row
  ]
  versions = requirements.versions()
  record = {
      'job': dataclasses.asdict(job),
      'sampled': results.scores['val-core/all/return'],
      'solved': results.scores['val-aux/all/solved'],
      'greedy': greedy,
      'curve': [round(row['return/mean'], 2) for row in rows if 'return/mean' in row],
      'clipped': [round(row['actor/pg_clipfrac'], 4) for row in rows if 'actor/pg_clipfrac' in row],
      'seconds': round(train_s, 1),
      'versions': {
          'stppo_jax': requirements.own_version(),
          'jax': versions['jax'],
          'flax': versions['flax'],
          'optax': versions['optax'],
      },
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('a', encoding='utf-8') as file:
    file.write(json.dumps(record, separators=(',', ':')) + '\n')
  shutil.rmtree(folder)
  jax.clear_caches()  # the next run has other programs, and would keep these in memory


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
  """Returns the 95% interval of the mean over seeds drawn with replacement."""
  rng = np.random.default_rng(0)
  draws = rng.choice(values, size=(DRAWS, len(values)))
  low, high = np.quantile(draws.mean(axis=1), (0.025, 0.975))
  return float(low), float(high)


def summary(records: dict[Job, dict]) -> Iterator[str]:
  """Yields the lines of the tables of the documentation."""
  yield '| maze | algorithm | ' + ' | '.join(f'{rate:g}' for rate in RATES) + ' | mean | seeds |'
  for method, observed in METHODS:
    found = [records[job]['sampled'] for job in search_jobs(method, observed) if job in records]
    rate = best_rate(records, method, observed)
    seeds = [records.get(Job(method, observed, rate, seed)) for seed in SEEDS]
    values = [record['sampled'] for record in seeds if record]
    cells = [observed, f'`{method}`', *(f'{value:.1f}' for value in found)]
    if values:
      low, high = bootstrap(values)
      cells.append(f'{np.mean(values):.1f} [{low:.1f}, {high:.1f}]')
      cells.append(', '.join(f'{value:.1f}' for value in values))
    yield f'| {" | ".join(cells)} |'


def main() -> None:
  """Runs what has no record, or prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--workdir', default='runs/maze', help='folder of the runs in progress')
  parser.add_argument('--methods', nargs='+', choices=NAMES, default=NAMES, help='only these run')
  parser.add_argument('--summary', action='store_true', help='print the tables, run nothing')
  args = parser.parse_args()
  if args.summary:
    print(*summary(read_records()), sep='\n')
    return
  for job in plan(methods=args.methods):
    run(job, pathlib.Path(args.workdir))
    print(f'{job}: {read_records()[job]["sampled"]:.1f}', flush=True)


if __name__ == '__main__':
  malloc.restart()
  main()
